"""A server for programs of a job: SERVER PORT [late=S] [exit=CODE] [deaf] [children] [plain] [moved] [mute] [worker]
[public].

It says "listening", and "asked to end" at SIGTERM. With ``exit`` it ends as soon as there is a file named "end".
"""

import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time

port, how = int(sys.argv[1]), dict([*word.split("=", 1), ""][:2] for word in sys.argv[2:])
left_out = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
print("server", os.getpid(), *(name for name in left_out if name in os.environ), flush=True)
print("GPUs", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)


def on_sigterm(*_: object) -> None:
    print("asked to end", flush=True)
    os._exit(0)


def end_later() -> None:
    while not os.path.exists("end"):
        time.sleep(0.01)
    print("the end", flush=True)
    code = int(how["exit"])
    os.kill(os.getpid(), -code) if code < 0 else os._exit(code)


signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in how else on_sigterm)
if "children" in how:  # one that ignores SIGTERM, and one whose parent ends, in a session of its own
    subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 1000"])
    subprocess.run(["sh", "-c", "setsid sleep 1000 &"], check=True)
if "worker" in how:
    subprocess.Popen([sys.executable, __file__, "0", "late=1000"])
if "exit" in how:
    threading.Thread(target=end_later, daemon=True).start()
time.sleep(float(how.get("late", 0)))


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if "mute" in how:
            time.sleep(1000)
        self.send_response(302 if "moved" in how else 200)
        if "moved" in how:
            self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    allow_reuse_address = "plain" not in how


assert socket.gethostname()
server = Server(("" if "public" in how else "127.0.0.1", port), Handler)
print("listening", flush=True)
server.serve_forever()
