package main

import (
	"context"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

const maxMessage = 16 << 20

// What protoc would write for `rpc Say(BytesValue) returns (BytesValue)`.
var echoService = grpc.ServiceDesc{
	ServiceName: "shunt.Echo",
	HandlerType: (*any)(nil),
	Methods: []grpc.MethodDesc{{MethodName: "Say", Handler: func(
		_ any, _ context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor,
	) (any, error) {
		message := new(wrapperspb.BytesValue)
		return message, decode(message)
	}}},
}

func serveGRPC(listen string) error {
	listener, err := net.Listen("tcp", listen)
	if err != nil {
		return err
	}
	server := grpc.NewServer(grpc.MaxRecvMsgSize(maxMessage))
	server.RegisterService(&echoService, nil)
	return server.Serve(listener)
}

type grpcConnection struct{ *grpc.ClientConn }

func openGRPC(asked options, _ int) (connection, error) {
	conn, err := grpc.NewClient("passthrough:///"+asked.to,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)))
	return grpcConnection{conn}, err
}

func (it grpcConnection) ask(body body) error {
	answer := new(wrapperspb.BytesValue)
	err := it.Invoke(context.Background(), "/shunt.Echo/Say", wrapperspb.Bytes(body.bytes), answer)
	if err != nil {
		return err
	}
	return same(answer.Value, body.bytes)
}

func (it grpcConnection) close() {
	it.ClientConn.Close()
}
