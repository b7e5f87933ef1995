// Servers and clients in Go, for the test of real programs and for benchmarks.
// Each client checks every byte that it gets, and prints how many answers it got.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"
)

// What the clients take.
type options struct {
	to       string
	folder   string
	duration time.Duration
	workers  int
	http2    bool
	echo     bool
	body     string
}

// One worker's connection; ask sends one request and checks the answer.
type connection interface {
	ask(body body) error
	close()
}

// A file that servers serve and clients hold their answers against.
type body struct {
	name  string
	bytes []byte
}

func main() {
	log.SetFlags(0)
	if len(os.Args) < 2 {
		log.Fatal("usage: programs COMMAND [OPTIONS]")
	}
	var asked options
	flags := flag.NewFlagSet(os.Args[1], flag.ExitOnError)
	listen := flags.String("listen", "", "address of a server")
	flags.StringVar(&asked.to, "to", "", "whom a client asks, and where a proxy sends")
	flags.StringVar(&asked.folder, "folder", "", "the bodies")
	flags.DurationVar(&asked.duration, "for", time.Second, "how long a client asks")
	flags.IntVar(&asked.workers, "workers", 4, "connections at once")
	flags.BoolVar(&asked.http2, "http2", false, "HTTP/2 without TLS")
	flags.BoolVar(&asked.echo, "echo", false, "send bodies as well")
	flags.StringVar(&asked.body, "body", "body-*", "which bodies")
	flags.Parse(os.Args[2:])
	if err := run(os.Args[1], *listen, asked); err != nil {
		log.Fatal(os.Args[1], ": ", err)
	}
}

func run(command, listen string, asked options) error {
	switch command {
	case "serve-http":
		return serveHTTP(listen, asked.folder)
	case "serve-grpc":
		return serveGRPC(listen)
	case "proxy":
		return proxy(listen, asked.to)
	case "ask-http":
		return ask(asked, openHTTP)
	case "ask-grpc":
		return ask(asked, openGRPC)
	case "ask-tcp":
		return ask(asked, openTCP)
	case "ask-memcached":
		return ask(asked, openMemcached)
	case "publish":
		return ask(asked, openPublisher)
	}
	return fmt.Errorf("unknown command")
}

// ask has each worker ask for all bodies in turn until the time is up.
func ask(asked options, open func(options, int) (connection, error)) error {
	bodies, err := readBodies(asked.folder, asked.body)
	if err != nil {
		return err
	}
	var answers atomic.Int64
	var workers sync.WaitGroup
	failed := make(chan error, asked.workers)
	end := time.Now().Add(asked.duration)
	for number := range asked.workers {
		workers.Go(func() {
			connection, err := open(asked, number)
			if err != nil {
				failed <- err
				return
			}
			defer connection.close()
			for turn := 0; turn < len(bodies) || time.Now().Before(end); turn++ {
				body := bodies[turn%len(bodies)]
				if err := connection.ask(body); err != nil {
					failed <- fmt.Errorf("%s, answer %d: %w", body.name, turn, err)
					return
				}
				answers.Add(1)
			}
		})
	}
	workers.Wait()
	close(failed)
	if err := <-failed; err != nil {
		return err
	}
	fmt.Println(answers.Load())
	return nil
}

func readBodies(folder, pattern string) ([]body, error) {
	paths, err := filepath.Glob(filepath.Join(folder, pattern))
	if err != nil || len(paths) == 0 {
		return nil, fmt.Errorf("no bodies in %q (%v)", folder, err)
	}
	var bodies []body
	for _, path := range paths {
		content, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		bodies = append(bodies, body{filepath.Base(path), content})
	}
	return bodies, nil
}

// same says where two bodies differ.
func same(got, expected []byte) error {
	if bytes.Equal(got, expected) {
		return nil
	}
	at := 0
	for at < min(len(got), len(expected)) && got[at] == expected[at] {
		at++
	}
	return fmt.Errorf("%d bytes instead of %d, the first wrong one is number %d", len(got), len(expected), at)
}
