"""A rank that asks vLLM in each step: URL MODEL. It ends when there is a file "go", rank 1 with 5 by a file "fail"."""

import json
import os
import sys
import time
import urllib.request

import torch
import torch.distributed as dist

url, model = sys.argv[1:]


def ask() -> str:
    question = {"model": model, "prompt": "a trainer asks", "max_tokens": 4}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(question).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        text = json.load(reply)["choices"][0]["text"]
    assert isinstance(text, str)
    return text


dist.init_process_group("gloo")
rank = dist.get_rank()
try:
    for step in range(1_000_000):
        answer = ask()
        done = torch.tensor([float(os.path.exists("go"))])
        dist.all_reduce(done, dist.ReduceOp.MIN)
        if step == 0:
            print("step 0:", repr(answer), flush=True)
        if rank == 1 and os.path.exists("fail"):
            sys.exit(5)
        if done.item():
            break
        time.sleep(0.1)  # a step of a trainer
except KeyboardInterrupt:
    print("asked at the end:", repr(ask()), flush=True)
    raise
dist.destroy_process_group()
