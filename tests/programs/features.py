"""Uses processes, tracebacks and its own source as programs do; writes a JSON file for each rank: {feature: result}."""

import asyncio
import concurrent.futures
import inspect
import multiprocessing
import os
import pickle
import subprocess
import sys
import traceback
import warnings

from feature_results import write_results


class Item:
    """A class of ``__main__``, to be pickled."""

    def __init__(self, number):
        self.number = number


def child(queue, item):
    queue.put((type(item).__module__, item.number + 1, os.environ.get("RANK"), len(sys.argv)))


def square(number):
    return number * number


def in_process(method):
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue, Item(41)))
    process.start()
    result = queue.get()
    process.join()
    return [*result[:2], result[2] == os.environ.get("RANK"), result[3], process.exitcode]


def in_pool(method):
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(method)) as pool:
        return list(pool.map(square, [2, 3]))


def in_manager(method):
    with multiprocessing.get_context(method).Manager() as manager:
        shared = manager.dict()
        shared["key"] = Item(7)
        return shared["key"].number


def pickling():
    item = pickle.loads(pickle.dumps(Item(5)))
    return [type(item) is Item, item.number, pickle.loads(pickle.dumps(square)) is square]


def source():
    return [inspect.getsource(Item).splitlines()[0], inspect.getsourcefile(square) == __file__, inspect.getmodule(Item)]


def with_asyncio():
    async def talk():
        process = await asyncio.create_subprocess_exec("echo", "hello", stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        return output.decode()

    return asyncio.run(talk())


def in_subprocess():
    output = subprocess.check_output('echo "$RANK"', shell=True, text=True)
    return output.strip() == os.environ.get("RANK", "")


def formatted_traceback():
    try:
        try:
            square(None)
        except TypeError as error:
            raise ValueError("second") from error
    except ValueError:
        return traceback.format_exc()


def stack():
    return [frame.function for frame in inspect.stack()[1:]]


def warned():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("from here", stacklevel=1)
    return [os.path.basename(each.filename) for each in caught]


FEATURES = {
    **{f"process {method}": lambda method=method: in_process(method) for method in ("fork", "spawn", "forkserver")},
    **{f"pool {method}": lambda method=method: in_pool(method) for method in ("fork", "spawn")},
    "manager": lambda: in_manager("spawn"),
    "pickling": pickling,
    "source": source,
    "asyncio": with_asyncio,
    "subprocess": in_subprocess,
    "traceback": formatted_traceback,
    "stack": stack,
    "warning": warned,
}


if __name__ == "__main__":
    write_results(FEATURES)
