"""What sockets do, one function a behaviour, each on a connection of its own.

behaviours.py TO LISTEN NAMESPACE plain|spliced

The server's end is made in the network namespace NAMESPACE, so that both ends are
in this process. With `spliced` every connection is engaged in both directions before
anything is tried on it: the kernel's count of TCP segments with data stands still.

Prints one JSON object: the outcome of each behaviour.
"""

import array
import ctypes
import errno
import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import termios
import threading
import time


def parse(address):
    host, port = address.rsplit(":", 1)
    return host, int(port)


TO = parse(sys.argv[1])
BEHAVIOURS = []
# Only a hang takes as long.
PATIENCE = 60.0
# For what is expected not to happen.
A_WHILE = 0.2
SIOCOUTQ = termios.TIOCOUTQ
SO_TIMESTAMP = 29  # include/uapi/asm-generic/socket.h; Python has no name for it
TCP_INFO_DATA_SEGMENTS_OUT = 156  # tcpi_data_segs_out in include/uapi/linux/tcp.h


def behaviour(function):
    BEHAVIOURS.append(function)
    return function


# ---- what the behaviours use


def outcome(call, *args):
    """What a call returns, or its errno."""
    try:
        result = call(*args)
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))
    return describe(result)


def describe(result):
    if isinstance(result, bytes):
        return result.decode() if len(result) <= 32 else f"{len(result)} bytes"
    return str(result)


def wait(sock, events=select.POLLIN, seconds=PATIENCE):
    """Waits for an event, and returns those that are there."""
    poll = select.poll()
    poll.register(sock, events)
    ready = poll.poll(seconds * 1000)
    return ready[0][1] if ready else 0


def flags(bits, prefix):
    names = ["IN", "PRI", "OUT", "ERR", "HUP", "RDHUP"]
    return "+".join(it for it in names if bits & getattr(select, prefix + it)) or "nothing"


def poll_flags(sock, seconds=0):
    events = select.POLLIN | select.POLLOUT | select.POLLPRI | select.POLLRDHUP
    return flags(wait(sock, events, seconds), "POLL")


def until(condition):
    """Waits until something is so that takes a moment."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("it did not come")
        time.sleep(0.001)


def in_time(call):
    """The outcome of a call that may wait for ever: it is woken by the end."""
    result = []
    thread = threading.Thread(target=lambda: result.append(outcome(call)), daemon=True)
    thread.start()
    thread.join(A_WHILE)
    return thread, result


def unread(sock):
    size = array.array("i", [0])
    fcntl.ioctl(sock, termios.FIONREAD, size)
    return size[0]


def unsent(sock):
    size = array.array("i", [0])
    fcntl.ioctl(sock, SIOCOUTQ, size)
    return size[0]


def arrive(sock, data, receiver):
    """Sends, and waits until it can be read."""
    sock.send(data)
    wait(receiver)


def segments(sock):
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return struct.unpack_from("I", info, TCP_INFO_DATA_SEGMENTS_OUT)[0]


def receive(sock, size):
    """Exactly so many bytes."""
    data = b""
    while len(data) < size:
        wait(sock)
        part = sock.recv(size - len(data))
        if not part:
            break
        data += part
    return data


def fill(sock):
    """Sends until there is no more room, for a while, and returns how much that was."""
    total = 0
    last = time.monotonic()
    while time.monotonic() - last < A_WHILE:
        try:
            total += sock.send(b"x" * 65536)
            last = time.monotonic()
        except BlockingIOError:
            time.sleep(0.01)
    return total


def magnitude(size):
    return "more than 64 KiB, less than 16 MiB" if 1 << 16 < size < 1 << 24 else size


def drain(sock, size):
    while size > 0:
        wait(sock)
        size -= len(sock.recv(1 << 20))


# ---- ends of the stream


@behaviour
def half_close_by_the_client(client, server):
    client.send(b"last")
    client.shutdown(socket.SHUT_WR)
    got = receive(server, 4), outcome(server.recv, 1)
    server.send(b"answer")
    return got, receive(client, 6)


@behaviour
def half_close_by_the_server(client, server):
    server.send(b"last")
    server.shutdown(socket.SHUT_WR)
    got = receive(client, 4), outcome(client.recv, 1)
    client.send(b"answer")
    return got, receive(server, 6)


@behaviour
def send_after_half_close(client, server):
    client.shutdown(socket.SHUT_WR)
    return outcome(client.send, b"x"), poll_flags(client)


@behaviour
def shutdown_both(client, server):
    arrive(client, b"last", server)
    client.shutdown(socket.SHUT_RDWR)
    return receive(server, 4), outcome(server.recv, 1), outcome(client.recv, 1)


@behaviour
def shutdown_of_reading(client, server):
    server.shutdown(socket.SHUT_RD)
    before = outcome(server.recv, 4)
    client.send(b"late")
    until(lambda: unread(server) == 4)
    return before, outcome(server.recv, 4), outcome(client.send, b"more")


@behaviour
def shutdown_of_reading_with_bytes_unread(client, server):
    arrive(client, b"early", server)
    server.shutdown(socket.SHUT_RD)
    return outcome(server.recv, 5), outcome(server.recv, 5)


@behaviour
def close_with_all_read(client, server):
    client.close()
    wait(server)
    return outcome(server.recv, 1), poll_flags(server)


@behaviour
def close_with_bytes_on_the_way(client, server):
    client.send(b"last words")
    client.close()
    return receive(server, 10), outcome(server.recv, 1)


@behaviour
def close_with_bytes_unread(client, server):
    arrive(client, b"unread", server)
    server.close()
    wait(client)
    return outcome(client.recv, 1)


@behaviour
def close_with_bytes_unread_by_both(client, server):
    arrive(client, b"unread", server)
    arrive(server, b"unread", client)
    server.close()
    wait(client, select.POLLRDHUP)
    return outcome(client.recv, 6), outcome(client.recv, 6)


@behaviour
def reset_by_linger(client, server):
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    wait(server)
    return poll_flags(server), outcome(server.recv, 1), outcome(server.recv, 1)


@behaviour
def reset_with_bytes_unread(client, server):
    arrive(client, b"unread", server)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    wait(server, select.POLLHUP)
    return outcome(server.recv, 6), outcome(server.recv, 6)


@behaviour
def send_after_the_peer_has_closed(client, server):
    signals = []
    before = signal.signal(signal.SIGPIPE, lambda *_: signals.append("SIGPIPE"))
    server.close()
    wait(client)
    first = outcome(client.send, b"x")
    wait(client, select.POLLERR)
    rest = outcome(client.send, b"x"), outcome(client.send, b"x")
    quiet = outcome(client.send, b"x", socket.MSG_NOSIGNAL)
    signal.signal(signal.SIGPIPE, before)
    return first, rest, quiet, signals


@behaviour
def error_of_the_socket_after_a_reset(client, server):
    server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    server.close()
    wait(client)
    error = client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    again = client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return errno.errorcode.get(error, error), again, outcome(client.recv, 1)


@behaviour
def disconnect_by_an_unspecified_address(client, server):
    libc = ctypes.CDLL(None, use_errno=True)
    address = struct.pack("H14x", socket.AF_UNSPEC)
    result = libc.connect(client.fileno(), address, len(address))
    wait(server)
    return result, outcome(client.getpeername), outcome(server.recv, 1)


# ---- readiness


def epoll_of(sock, events):
    epoll = select.epoll()
    epoll.register(sock, events)
    return epoll


def epoll_flags(epoll, seconds=0):
    return [flags(bits, "EPOLL") for _, bits in epoll.poll(seconds)]


@behaviour
def poll_before_and_after_bytes(client, server):
    before = poll_flags(server)
    arrive(client, b"x", server)
    return before, poll_flags(server), server.recv(1), poll_flags(server)


@behaviour
def select_before_and_after_bytes(client, server):
    def ready():
        return [len(it) for it in select.select([server], [server], [server], 0)]

    before = ready()
    arrive(client, b"x", server)
    return before, ready(), server.recv(1), ready()


@behaviour
def level_triggered_epoll(client, server):
    epoll = epoll_of(server, select.EPOLLIN)
    client.send(b"abc")
    first = epoll_flags(epoll, PATIENCE), server.recv(1)
    return first, epoll_flags(epoll), server.recv(9), epoll_flags(epoll)


@behaviour
def edge_triggered_epoll(client, server):
    epoll = epoll_of(server, select.EPOLLIN | select.EPOLLET)
    client.send(b"abc")
    first = epoll_flags(epoll, PATIENCE), epoll_flags(epoll)
    client.send(b"def")
    second = epoll_flags(epoll, PATIENCE), epoll_flags(epoll)
    return first, second, receive(server, 6), epoll_flags(epoll)


@behaviour
def one_shot_epoll(client, server):
    events = select.EPOLLIN | select.EPOLLONESHOT
    epoll = epoll_of(server, events)
    client.send(b"a")
    first = epoll_flags(epoll, PATIENCE)
    client.send(b"b")
    until(lambda: unread(server) == 2)
    silent = epoll_flags(epoll)
    epoll.modify(server, events)
    return first, silent, epoll_flags(epoll)


@behaviour
def epoll_that_is_registered_with_bytes_waiting(client, server):
    arrive(client, b"abc", server)
    edge = epoll_of(server, select.EPOLLIN | select.EPOLLET)
    return epoll_flags(edge), epoll_flags(edge), server.recv(9)


@behaviour
def epoll_of_a_half_close(client, server):
    events = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP
    client.shutdown(socket.SHUT_WR)
    wait(server)
    half = epoll_flags(epoll_of(server, events))
    server.shutdown(socket.SHUT_WR)
    wait(server, select.POLLHUP)
    return half, epoll_flags(epoll_of(server, events))


@behaviour
def edge_triggered_epoll_of_the_end_behind_bytes(client, server):
    epoll = epoll_of(server, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
    client.send(b"last")
    epoll_flags(epoll, PATIENCE)
    got = receive(server, 4)
    client.shutdown(socket.SHUT_WR)
    return got, epoll_flags(epoll, PATIENCE), outcome(server.recv, 1)


@behaviour
def epoll_of_room_to_send(client, server):
    epoll = epoll_of(client, select.EPOLLOUT | select.EPOLLET)
    first = epoll_flags(epoll)
    size = fill(client)
    epoll_flags(epoll)
    full = epoll_flags(epoll)
    drain(server, size)
    return first, full, epoll_flags(epoll, PATIENCE)


# ---- reading


@behaviour
def peek(client, server):
    arrive(client, b"abc", server)
    first = server.recv(2, socket.MSG_PEEK), server.recv(9, socket.MSG_PEEK)
    return first, unread(server), server.recv(9), outcome(server.recv, 9, socket.MSG_PEEK)


@behaviour
def truncating_receive(client, server):
    """MSG_TRUNC throws bytes away without copying them."""
    arrive(client, b"abcdef", server)
    return outcome(server.recv_into, bytearray(3), 3, socket.MSG_TRUNC), outcome(server.recv, 9)


@behaviour
def truncating_receive_without_a_buffer(client, server):
    libc = ctypes.CDLL(None, use_errno=True)
    arrive(client, b"abcdef", server)
    result = libc.recv(server.fileno(), None, 3, socket.MSG_TRUNC)
    error = errno.errorcode.get(ctypes.get_errno()) if result < 0 else result
    return error, outcome(server.recv, 9)


@behaviour
def wait_for_all_on_a_non_blocking_socket(client, server):
    arrive(client, b"abc", server)
    return outcome(server.recv, 6, socket.MSG_WAITALL)


@behaviour
def receive_without_bytes(client, server):
    return outcome(server.recv, 1), outcome(server.recv, 1, socket.MSG_DONTWAIT)


@behaviour
def receive_of_no_length(client, server):
    before = outcome(server.recv, 0)
    arrive(client, b"x", server)
    return before, outcome(server.recv, 0), outcome(server.recv, 1)


@behaviour
def one_receive_of_several_sends(client, server):
    for part in (b"ab", b"cd", b"ef"):
        client.send(part)
    until(lambda: unread(server) == 6)
    return outcome(server.recv, 100)


@behaviour
def several_receives_of_one_send(client, server):
    arrive(client, b"abcdef", server)
    return [server.recv(2) for _ in range(3)], outcome(server.recv, 2)


@behaviour
def receive_into_several_buffers(client, server):
    arrive(client, b"abcdef", server)
    buffers = [bytearray(2), bytearray(9)]
    size = os.readv(server.fileno(), buffers)
    return size, bytes(buffers[0]), bytes(buffers[1][:4])


@behaviour
def receive_message(client, server):
    arrive(client, b"abcdef", server)
    data, ancillary, bits, address = server.recvmsg(9, 256)
    return data, ancillary, bits, address


@behaviour
def receive_message_with_a_time_stamp(client, server):
    server.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMP, 1)
    arrive(client, b"abc", server)
    data, ancillary, _, _ = server.recvmsg(9, 256)
    return data, [kind for _, kind, _ in ancillary]


@behaviour
def read_by_the_file_descriptor(client, server):
    arrive(client, b"abc", server)
    return os.read(server.fileno(), 9), outcome(os.read, server.fileno(), 9)


@behaviour
def number_of_unread_bytes(client, server):
    sizes = [unread(server)]
    for size in (1, 10, 1000):
        client.send(b"x" * size)
        until(lambda: unread(server) == sizes[-1] + size)
        sizes.append(unread(server))
    server.recv(500)
    return sizes, unread(server)


@behaviour
def urgent_byte(client, server):
    client.send(b"ab")
    client.send(b"!", socket.MSG_OOB)
    wait(server)
    until(lambda: unread(server) >= 2)
    return outcome(server.recv, 9), outcome(server.recv, 1, socket.MSG_OOB)


@behaviour
def low_water_set_later(client, server):
    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 4)
    time.sleep(A_WHILE)
    arrive_in = []
    for part in (b"ab", b"cd"):
        client.send(part)
        until(lambda: unread(server) >= 2 * len(arrive_in) + 2)
        arrive_in.append(poll_flags(server))
    return arrive_in, outcome(server.recv, 9)


# ---- blocking mode after the connection was spliced


@behaviour
def blocking_receive_of_bytes_that_wait(client, server):
    arrive(client, b"abc", server)
    server.setblocking(True)
    return outcome(server.recv, 9)


@behaviour
def blocking_receive_that_waits(client, server):
    server.setblocking(True)
    thread, result = in_time(lambda: server.recv(9))
    waited = not result
    client.send(b"late")
    thread.join(PATIENCE)
    return waited, result


@behaviour
def blocking_receive_of_the_end(client, server):
    server.setblocking(True)
    thread, result = in_time(lambda: server.recv(9))
    waited = not result
    client.shutdown(socket.SHUT_WR)
    thread.join(PATIENCE)
    return waited, result


@behaviour
def blocking_receive_after_own_half_close(client, server):
    server.setblocking(True)
    server.shutdown(socket.SHUT_WR)
    thread, result = in_time(lambda: server.recv(9))
    waited = not result
    client.send(b"late")
    thread.join(PATIENCE)
    return waited, result


@behaviour
def blocking_receive_with_a_timeout(client, server):
    server.setblocking(True)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 100_000))
    return outcome(server.recv, 9)


@behaviour
def blocking_receive_of_all(client, server):
    server.setblocking(True)
    client.send(b"abc")
    thread, result = in_time(lambda: server.recv(6, socket.MSG_WAITALL))
    waited = not result
    client.send(b"def")
    thread.join(PATIENCE)
    return waited, result


@behaviour
def blocking_send_without_room(client, server):
    size = fill(client)
    client.setblocking(True)
    thread, result = in_time(lambda: client.send(b"x" * 65536))
    waited = not result
    drain(server, size + 65536)
    thread.join(PATIENCE)
    return waited, result


# ---- writing


@behaviour
def room_to_send(client, server):
    size = fill(client)
    full = outcome(client.send, b"x"), poll_flags(client)
    drain(server, size)
    wait(client, select.POLLOUT)
    return magnitude(size), full, poll_flags(client), outcome(client.send, b"x")


@behaviour
def room_to_send_with_small_buffers(client, server):
    client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    size = fill(client)
    drain(server, size)
    sizes = [it.getsockopt(socket.SOL_SOCKET, kind)
             for it, kind in ((client, socket.SO_SNDBUF), (server, socket.SO_RCVBUF))]
    return "less than 256 KiB" if size < 1 << 18 else magnitude(size), sizes


@behaviour
def send_of_no_length(client, server):
    return outcome(client.send, b""), poll_flags(server)


@behaviour
def send_of_a_megabyte(client, server):
    data = bytes(range(256)) * 4096
    sent = 0
    got = b""
    while len(got) < len(data):
        try:
            sent += client.send(data[sent:])
        except BlockingIOError:
            pass
        if wait(server, select.POLLIN, 0 if sent < len(data) else PATIENCE):
            got += server.recv(1 << 20)
    return got == data


@behaviour
def send_from_several_buffers(client, server):
    return os.writev(client.fileno(), [b"ab", b"", b"cd"]), receive(server, 4)


@behaviour
def send_with_more_to_come(client, server):
    client.send(b"ab", socket.MSG_MORE)
    client.send(b"cd")
    return receive(server, 4)


@behaviour
def send_with_more_to_come_that_does_not_come(client, server):
    client.send(b"ab", socket.MSG_MORE)
    return flags(wait(server, select.POLLIN, 0.05), "POLL"), receive(server, 2)


@behaviour
def corked_sends(client, server):
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
    client.send(b"ab")
    corked = flags(wait(server, select.POLLIN, 0.05), "POLL")
    client.send(b"cd")
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)
    return corked, receive(server, 4)


@behaviour
def send_of_a_file(client, server):
    with tempfile.TemporaryFile() as file:
        file.write(b"0123456789" * 1000)
        file.flush()
        size = os.sendfile(client.fileno(), file.fileno(), 5, 5000)
        return size, receive(server, size) == (b"5678901234" * 500)


@behaviour
def send_of_an_urgent_byte_and_more(client, server):
    client.send(b"!", socket.MSG_OOB)
    client.send(b"ab")
    wait(server)
    time.sleep(A_WHILE)
    return outcome(server.recv, 9), outcome(server.recv, 9)


@behaviour
def number_of_unsent_bytes(client, server):
    arrive(client, b"abc", server)
    until(lambda: unsent(client) == 0)
    return unsent(client)


@behaviour
def number_of_unsent_bytes_without_room(client, server):
    size = fill(client)
    is_some = unsent(client) > 0
    drain(server, size)
    until(lambda: unsent(client) == 0)
    return is_some


# ---- options and descriptors


@behaviour
def names_of_the_ends(client, server):
    return client.getpeername() == TO, server.getpeername()[0], server.getsockname(), \
        client.getsockname() == server.getpeername()


@behaviour
def options_read_back(client, server):
    options = [(socket.SOL_SOCKET, it) for it in
               (socket.SO_KEEPALIVE, socket.SO_TYPE, socket.SO_ERROR, socket.SO_RCVLOWAT)]
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    options += [(socket.IPPROTO_TCP, it) for it in (socket.TCP_NODELAY, socket.TCP_KEEPIDLE)]
    return [client.getsockopt(*it) for it in options]


@behaviour
def keepalive_of_a_silent_connection(client, server):
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT):
        client.setsockopt(socket.IPPROTO_TCP, option, 1)
    time.sleep(3)
    client.send(b"still here")
    return receive(server, 10)


@behaviour
def user_timeout_with_a_reader_that_stops(client, server):
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1500)
    client.send(b"x" * 1000)
    time.sleep(2)
    client.send(b"y")
    return receive(server, 1001)[-1:], outcome(client.recv, 1)


@behaviour
def congestion_control_changed(client, server):
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    client.send(b"abc")
    return receive(server, 3)


@behaviour
def quick_acknowledgements(client, server):
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
    client.send(b"abc")
    return receive(server, 3)


@behaviour
def state_in_tcp_info(client, server):
    state = [it.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)[0] for it in (client, server)]
    client.shutdown(socket.SHUT_WR)
    wait(server)
    until(lambda: client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)[0] == 5)
    return state, server.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)[0]


@behaviour
def segments_in_tcp_info(client, server):
    before = segments(client)
    client.send(b"abc")
    receive(server, 3)
    return segments(client) - before


@behaviour
def duplicated_descriptor(client, server):
    copy = client.dup()
    client.close()
    copy.send(b"abc")
    got = receive(server, 3)
    still = poll_flags(server)
    copy.close()
    wait(server)
    return got, still, outcome(server.recv, 1)


@behaviour
def both_sides_of_a_fork(client, server):
    child = os.fork()
    if child == 0:
        try:
            client.send(b"child")
            os.write(client.fileno(), receive(client, 6))
        finally:
            os._exit(0)
    got = receive(server, 5)
    server.send(b"answer")
    got += receive(server, 6)
    os.waitpid(child, 0)
    client.send(b"parent")
    return got, receive(server, 6)


@behaviour
def descriptor_sent_to_another_process(client, server):
    near, far = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            _, files, _, _ = socket.recv_fds(far, 1, 1)
            os.write(files[0], b"from the child")
        finally:
            os._exit(0)
    socket.send_fds(near, [b"x"], [client.fileno()])
    client.close()
    got = receive(server, 14)
    os.waitpid(child, 0)
    wait(server)
    return got, outcome(server.recv, 1)


@behaviour
def death_of_the_process_with_bytes_on_the_way(client, server):
    child = os.fork()
    if child == 0:
        client.send(b"last words")
        os.kill(os.getpid(), signal.SIGKILL)
    client.close()
    os.waitpid(child, 0)
    return receive(server, 10), outcome(server.recv, 1)


@behaviour
def both_ends_send_at_once(client, server):
    client.send(b"to the server")
    server.send(b"to the client")
    return receive(server, 13), receive(client, 13)


@behaviour
def several_writers(client, server):
    def write(letter):
        for _ in range(100):
            while True:
                try:
                    client.send(letter * 100)
                    break
                except BlockingIOError:
                    wait(client, select.POLLOUT)

    threads = [threading.Thread(target=write, args=(it,)) for it in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    got = receive(server, 30000)
    for thread in threads:
        thread.join()
    whole = all(len(set(got[at:at + 100])) == 1 for at in range(0, len(got), 100))
    return len(got), whole


# ---- connections


def enter(namespace):
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace) as file:
        if libc.setns(file.fileno(), 0x40000000) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def listen(address, namespace):
    """Of a thread in the other namespace: its socket stays there."""
    made = []

    def make():
        enter(namespace)
        made.append(socket.create_server(address, backlog=128))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]


def connect(listener, to):
    client = socket.create_connection(to)
    server, _ = listener.accept()
    for sock in (client, server):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client, server


def talk(client, server):
    """Both ways, and whether TCP carried nothing of it."""
    before = segments(client), segments(server)
    for sender, receiver in ((client, server), (server, client)):
        sender.send(b"0123456789")
        if receive(receiver, 10) != b"0123456789":
            raise ValueError("wrong bytes")
    return before == (segments(client), segments(server))


def engage(connections):
    end = time.monotonic() + PATIENCE
    waiting = list(connections)
    while waiting:
        if time.monotonic() > end:
            raise TimeoutError(f"{len(waiting)} of {len(connections)} were not spliced")
        waiting = [it for it in waiting if not talk(*it)]
        time.sleep(0.01)


def main():
    # The kernel begins to stamp packets a moment after the first socket asks for it.
    stamps = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    stamps.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMP, 1)
    _, listen_at, namespace, mode = sys.argv[1:]
    listener = listen(parse(listen_at), namespace)
    connections = [connect(listener, TO) for _ in BEHAVIOURS]
    if mode == "spliced":
        engage(connections)
    outcomes = {}
    for function, ends in zip(BEHAVIOURS, connections):
        if talk(*ends) != (mode == "spliced"):
            raise ValueError(f"{function.__name__}: the connection is not {mode}")
        name = function.__name__.replace("_", " ")
        try:
            outcomes[name] = repr(function(*ends))
        except Exception as error:
            outcomes[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(outcomes))


main()
