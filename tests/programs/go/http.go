package main

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
)

func serveHTTP(listen, folder string) error {
	mux := http.NewServeMux()
	mux.Handle("GET /", http.FileServer(http.Dir(folder)))
	mux.HandleFunc("POST /echo", func(answer http.ResponseWriter, request *http.Request) {
		content, err := io.ReadAll(request.Body)
		if err != nil {
			http.Error(answer, err.Error(), http.StatusBadRequest)
			return
		}
		answer.Write(content)
	})
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	server := http.Server{Addr: listen, Handler: mux, Protocols: protocols}
	return server.ListenAndServe()
}

type httpConnection struct {
	client *http.Client
	url    string
	echo   bool
}

func openHTTP(asked options, _ int) (connection, error) {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(!asked.http2)
	protocols.SetUnencryptedHTTP2(asked.http2)
	transport := &http.Transport{MaxConnsPerHost: 1, Protocols: protocols, DisableCompression: true}
	return &httpConnection{&http.Client{Transport: transport}, "http://" + asked.to, asked.echo}, nil
}

func (it *httpConnection) ask(body body) error {
	if err := it.check(body, http.MethodGet, "/"+body.name, nil); err != nil || !it.echo {
		return err
	}
	return it.check(body, http.MethodPost, "/echo", bytes.NewReader(body.bytes))
}

func (it *httpConnection) check(body body, method, path string, content io.Reader) error {
	request, err := http.NewRequest(method, it.url+path, content)
	if err != nil {
		return err
	}
	answer, err := it.client.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	got, err := io.ReadAll(answer.Body)
	if err != nil {
		return err
	}
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s %s: %s", method, path, answer.Status)
	}
	return same(got, body.bytes)
}

func (it *httpConnection) close() {
	it.client.CloseIdleConnections()
}

// proxy has the runtime copy: from one TCP connection to another it does so with
// splice(2).
func proxy(listen, to string) error {
	listener, err := net.Listen("tcp", listen)
	if err != nil {
		return err
	}
	for {
		near, err := listener.Accept()
		if err != nil {
			return err
		}
		go func() {
			far, err := net.Dial("tcp", to)
			if err != nil {
				near.Close()
				return
			}
			done := make(chan struct{})
			go func() {
				copyStream(far, near)
				close(done)
			}()
			copyStream(near, far)
			<-done
			near.Close()
			far.Close()
		}()
	}
}

func copyStream(to, from net.Conn) {
	io.Copy(to, from)
	to.(*net.TCPConn).CloseWrite()
}
