"""What gRPC does with as many bytes: one process asks, another answers with a stream of messages over loopback, neither of which looks at a byte.

Usage: grpc_stream.py BYTES SECONDS. Prints a line of JSON: `gb_s`, of messages that are received one after the other.
"""

import json
import subprocess
import sys
import time
from concurrent import futures

import grpc

OPTIONS = [(f"grpc.max_{way}_message_length", -1) for way in ["send", "receive"]]
METHOD = ("bench", "stream")
# Messages that are not measured.
WARMUP = 3


def serve(size):
    message = bytes(size)

    def stream(_, context):
        while context.is_active():
            yield message

    server = grpc.server(futures.ThreadPoolExecutor(1), options=OPTIONS)
    service, method = METHOD
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {method: grpc.unary_stream_rpc_method_handler(stream)})])
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    # Until who has started this one goes.
    sys.stdin.read()


def main():
    size = int(sys.argv[1])
    if len(sys.argv) == 2:
        return serve(size)
    seconds = float(sys.argv[2])
    server = subprocess.Popen([sys.executable, __file__, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        channel = grpc.insecure_channel(f"127.0.0.1:{int(server.stdout.readline())}", options=OPTIONS)
        messages = iter(channel.unary_stream("/".join(["", *METHOD]))(b"", timeout=60))
        for _ in range(WARMUP):
            assert len(next(messages)) == size
        began, count = time.monotonic(), 0
        while (elapsed := time.monotonic() - began) < seconds or count == 0:
            assert len(next(messages)) == size
            count += 1
        print(json.dumps({"gb_s": count * size / elapsed / 1e9}), flush=True)
    finally:
        server.kill()


main()
