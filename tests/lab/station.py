"""A program on a host of a lab that sends and hears datagrams as it is told, a line at a time: `say ADDRESS TEXT`, `hear SECONDS`."""

import contextlib
import socket
import sys

PORT = 7100

sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind((sys.argv[1], PORT))
print("ready", flush=True)
for line in sys.stdin:
    verb, value, *text = line.split()
    if verb == "say":
        with contextlib.suppress(OSError):
            sock.sendto(text[0].encode(), (value, PORT))
        print("said", flush=True)
    else:
        sock.settimeout(float(value))
        try:
            print(sock.recv(100).decode(), flush=True)
        except TimeoutError:
            print("nothing", flush=True)
