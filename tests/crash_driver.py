"""Runs one operation on a store in a forked child that dies, or fails, at a chosen call.

Started with crash_faults.so preloaded. Reads a JSON object a line: operation, store, argument,
n, failure (0 kill before call n, -1 after it, else an errno for call n and all after it).
Answers with one: signal, code (0 done, 1 a WeightsError, 2 anything else), calls, text.
"""

import ctypes
import json
import os
import sys
import traceback
from pathlib import Path

from appliance.checkpoint.exl3 import read_checkpoint
from appliance.errors import ApplianceError, WeightsError
from appliance.weights.activate import activate
from appliance.weights.bundle_write import create_bundle
from appliance.weights.collect import Beside
from appliance.weights.fetch import Transfer
from appliance.weights.network import Network
from appliance.weights.pull import pull
from appliance.weights.repack import repack
from appliance.weights.repair import repair
from appliance.weights.source import open_source
from appliance.weights.store import make_store
from appliance.weights.sweep import gc
from appliance.weights.verify import Reading, verify

CONNECTIONS = 2


def run(operation, folder, argument):
    store = make_store(Path(folder))
    if operation == "pull":
        transfer = Transfer(connections=CONNECTIONS, first_pause_seconds=0.01)
        pull(store, open_source(argument, Network()), transfer, lambda moment: None)
    elif operation == "verify":
        verdict = look(store, full=True)
        assert verdict.is_right, verdict
    elif operation == "activate":
        activate(store, store.find(argument), in_use_is_fine=True)
    elif operation == "gc":
        gc(store)
    elif operation == "bundle":
        create_bundle(
            store,
            store.find(None),
            Path(folder) / "bundle",
            beside=Beside(),
            part_bytes=1 << 20,
            observe=lambda done, total: None,
        )
    elif operation == "repack":
        checkpoint = read_checkpoint(store.pointer)
        repack(checkpoint, Path(folder) / "arena", 1, lambda done, total: None)
    elif operation == "repair":
        bad = look(store, full=False).bad
        transfer = Transfer(connections=CONNECTIONS, first_pause_seconds=0.01)
        if bad:
            repair(store, open_source(argument, Network()), bad, transfer)
        assert look(store, full=False).is_right
    else:
        raise ValueError(operation)


def look(store, full):
    return verify(store, store.releases(), Reading(full=full, threads=2), lambda done, total: None)


def child(asked, answer):
    faults = ctypes.CDLL(None)
    faults.calls.restype = ctypes.c_long
    faults.watch(asked["store"].encode())
    faults.arm(ctypes.c_long(asked["n"]), ctypes.c_int(asked["failure"]))
    code, text = 0, ""
    try:
        run(asked["operation"], asked["store"], asked["argument"])
    except (WeightsError, ApplianceError) as error:
        code, text = 1, str(error)
    except BaseException:  # noqa: BLE001
        code, text = 2, traceback.format_exc()
    os.write(answer, json.dumps({"code": code, "calls": faults.calls(), "text": text}).encode())
    os._exit(0)


def main():
    for line in sys.stdin:
        asked = json.loads(line)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            child(asked, writing)
        os.close(writing)
        with open(reading, "rb") as stream:
            text = stream.read()
        _, status = os.waitpid(pid, 0)
        signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        found = json.loads(text) if text else {"code": None, "calls": None, "text": ""}
        print(json.dumps({"signal": signal, **found}), flush=True)


main()
