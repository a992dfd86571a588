"""Tests of which failures of ranks a server may explain that ends at the same time."""

from types import SimpleNamespace

import pytest

from ddplaunch.base.options import Options
from ddplaunch.core.failures import RankFailure
from ddplaunch.features.programs.feature import FEATURE
from ddplaunch.features.programs.options import ProgramOptions
from ddplaunch.features.programs.spec import ProgramSpec, encode_program

VLLM = encode_program(ProgramSpec("vllm", ("vllm",))).partition("=")[2]


@pytest.mark.parametrize(
    ("message", "explained"),
    [
        ("ConnectionRefusedError: [Errno 111] Connection refused", True),
        ("httpx.RemoteProtocolError: Server disconnected without sending a response.", True),
        ("urllib.error.HTTPError: HTTP Error 500: Internal Server Error", True),  # vLLM while it ends
        ("requests.exceptions.HTTPError: 503 Server Error: Service Unavailable for url: http://127.0.0.1:8000", True),
        ("openai.InternalServerError: Error code: 500 - {'error': {'message': 'EngineCore died'}}", True),
        ("urllib.error.HTTPError: HTTP Error 404: Not Found", False),
        ("ValueError: expected 5000 tokens, got 1503", False),
        ("ValueError: boom\nConnectionError: in the second line", False),
        (None, False),
    ],
)
def test_a_failure_that_a_lost_server_explains(message, explained):
    class Context:
        options = Options({ProgramOptions: ProgramOptions(program=(VLLM,))}, {})
        config = SimpleNamespace(max_nodes=1)

    side = FEATURE.make_job_side(Context())
    failure = RankFailure(0, 0, "n0", 7, 0, 1, None, message, None, 0.0, None)
    assert side.may_explain(failure) is explained
