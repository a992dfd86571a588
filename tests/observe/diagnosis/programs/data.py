import ctypes
import threading
import time

LOCK = threading.Lock()


def load_batch():
    time.sleep(1000)


def hold():
    ctypes.PyDLL(None).sleep(8)


def lock():
    with LOCK:
        again()


def again():
    with LOCK:
        pass


class Slow:
    def __len__(self):
        return 10

    def __getitem__(self, index):
        time.sleep(1000)


def loader():
    import torch

    for _ in torch.utils.data.DataLoader(Slow(), num_workers=1):
        pass
