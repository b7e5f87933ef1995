package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"strings"
)

type tcpConnection struct {
	net.Conn
	reader *bufio.Reader
	number int
	turn   int
}

func openConnection(to string, number int) (*tcpConnection, error) {
	conn, err := net.Dial("tcp", to)
	if err != nil {
		return nil, err
	}
	return &tcpConnection{conn, bufio.NewReader(conn), number, 0}, nil
}

func (it *tcpConnection) close() {
	it.Conn.Close()
}

// line reads one that ends with \r\n.
func (it *tcpConnection) line() (string, error) {
	line, err := it.reader.ReadString('\n')
	return strings.TrimRight(line, "\r\n"), err
}

func (it *tcpConnection) expect(expected string) error {
	line, err := it.line()
	if err == nil && line != expected {
		err = fmt.Errorf("%q instead of %q", line, expected)
	}
	return err
}

func (it *tcpConnection) read(size int) ([]byte, error) {
	content := make([]byte, size)
	_, err := io.ReadFull(it.reader, content)
	return content, err
}

// A server that echoes.
type tcpEcho struct{ *tcpConnection }

func openTCP(asked options, number int) (connection, error) {
	conn, err := openConnection(asked.to, number)
	return tcpEcho{conn}, err
}

func (it tcpEcho) ask(body body) error {
	written := make(chan error, 1)
	go func() {
		_, err := it.Write(body.bytes)
		written <- err
	}()
	got, err := it.read(len(body.bytes))
	if err := <-written; err != nil {
		return err
	}
	if err != nil {
		return err
	}
	return same(got, body.bytes)
}

// memcached's text protocol: each body is stored, and then asked for.
type memcached struct {
	*tcpConnection
	stored map[string]bool
}

func openMemcached(asked options, number int) (connection, error) {
	conn, err := openConnection(asked.to, number)
	return memcached{conn, map[string]bool{}}, err
}

// Stores a body when it is first asked for, and now and then.
func (it memcached) ask(body body) error {
	it.turn++
	key := fmt.Sprintf("%s-%d", body.name, it.number)
	if !it.stored[key] || it.turn%16 == 0 {
		if err := it.store(key, body.bytes); err != nil {
			return err
		}
		it.stored[key] = true
	}
	if _, err := fmt.Fprintf(it, "get %s\r\n", key); err != nil {
		return err
	}
	if err := it.expect(fmt.Sprintf("VALUE %s 0 %d", key, len(body.bytes))); err != nil {
		return err
	}
	got, err := it.read(len(body.bytes))
	if err != nil {
		return err
	}
	for _, line := range []string{"", "END"} {
		if err := it.expect(line); err != nil {
			return err
		}
	}
	return same(got, body.bytes)
}

func (it memcached) store(key string, content []byte) error {
	head := fmt.Sprintf("set %s 0 0 %d\r\n", key, len(content))
	if _, err := it.Write(append(append([]byte(head), content...), "\r\n"...)); err != nil {
		return err
	}
	return it.expect("STORED")
}
