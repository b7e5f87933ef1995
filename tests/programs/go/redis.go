package main

import (
	"fmt"
	"strconv"
)

// A channel of Redis with its own subscriber: what is published arrives.
type publisher struct {
	*tcpConnection
	subscriber *tcpConnection
	channel    string
}

func openPublisher(asked options, number int) (connection, error) {
	subscriber, err := openConnection(asked.to, number)
	if err != nil {
		return nil, err
	}
	conn, err := openConnection(asked.to, number)
	if err != nil {
		return nil, err
	}
	channel := "channel-" + strconv.Itoa(number)
	fmt.Fprintf(subscriber, "SUBSCRIBE %s\r\n", channel)
	for _, line := range []string{"*3", "$9", "subscribe", "$" + strconv.Itoa(len(channel)), channel, ":1"} {
		if err := subscriber.expect(line); err != nil {
			return nil, err
		}
	}
	return publisher{conn, subscriber, channel}, nil
}

func (it publisher) ask(body body) error {
	size := strconv.Itoa(len(body.bytes))
	head := fmt.Sprintf("*3\r\n$7\r\nPUBLISH\r\n$%d\r\n%s\r\n$%s\r\n", len(it.channel), it.channel, size)
	if _, err := it.Write(append(append([]byte(head), body.bytes...), "\r\n"...)); err != nil {
		return err
	}
	lines := []string{"*3", "$7", "message", "$" + strconv.Itoa(len(it.channel)), it.channel, "$" + size}
	for _, line := range lines {
		if err := it.subscriber.expect(line); err != nil {
			return err
		}
	}
	got, err := it.subscriber.read(len(body.bytes))
	if err != nil {
		return err
	}
	if err := it.subscriber.expect(""); err != nil {
		return err
	}
	if err := it.expect(":1"); err != nil {
		return err
	}
	return same(got, body.bytes)
}

func (it publisher) close() {
	it.subscriber.close()
	it.tcpConnection.close()
}
