"""A real vLLM as a service beside two ranks, each of them ended in each way: ``python -m tests.tools.vllm FOLDER``."""
