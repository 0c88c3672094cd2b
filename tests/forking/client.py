"""Stand for ``python``: let the server fork, pass signals on, and end as the fork ends.

It runs in each program that a test starts, so it imports little.
"""

import array
import os
import signal
import socket
import sys

FRESH = os.environ["STABLENUM_TESTS_PYTHON"]
FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM")


def become_python():
    os.execv(FRESH, [FRESH, *sys.argv[1:]])


def request(open_files):
    """What is sent to the server, as the text of a Python literal."""
    ignored = [n for n in FORWARDED if signal.getsignal(getattr(signal, n)) == signal.SIG_IGN]
    mask = os.umask(0)
    os.umask(mask)
    return repr(
        {
            "arguments": sys.argv[1:],
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "files": open_files,
            "ignored": ignored,
            "umask": mask,
            "group": os.getpgrp(),
            "session": os.getsid(0),
        }
    ).encode()


def main():
    arguments = sys.argv[1:]
    while arguments and arguments[0] in ("-u", "-W"):
        arguments = arguments[1:] if arguments[0] == "-u" else arguments[2:]
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-c", "-m")):
        become_python()
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(os.path.join(os.environ["STABLENUM_TESTS_FORKS"], "socket"))
    except (KeyError, OSError):
        become_python()
    open_files = []
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            os.fstat(number)
        except OSError:
            continue  # that of listdir itself
        if number != server.fileno():
            open_files.append(number)
    sent = request(open_files)
    server.sendall(len(sent).to_bytes(8, "big") + sent)
    for begin in range(0, len(open_files), 100):  # the kernel takes up to 253 at a time
        part = array.array("i", open_files[begin : begin + 100])
        server.sendmsg([b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, part)])
    answer = server.recv(16)
    if not answer.startswith(b"pid"):
        become_python()
    pid = int(answer[3:])
    for name in FORWARDED:
        number = getattr(signal, name)
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: os.kill(pid, number))
    # Whoever reads the program's output must see its end when the program ends, not when this process does.
    for number in open_files:
        os.close(number)
    status = b""
    while len(status) < 4:
        part = server.recv(4 - len(status))
        if not part:
            os._exit(255)  # the server is gone
        status += part
    code = os.waitstatus_to_exitcode(int.from_bytes(status, "big"))
    if code < 0:
        if -code != signal.SIGKILL:  # whose handler cannot be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
