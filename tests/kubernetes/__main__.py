"""``python -m tests.kubernetes [FOLDER]``: serves a cluster whose pods run in FOLDER, for trying commands by hand."""

import sys
import threading
from pathlib import Path

from tests.kubernetes.api_server import ApiServer

server = ApiServer(Path(sys.argv[1] if sys.argv[1:] else ".").resolve())
print(f"export KUBECONFIG={server.kubeconfig('test')}", flush=True)
try:
    threading.Event().wait()
except KeyboardInterrupt:
    server.stop()
