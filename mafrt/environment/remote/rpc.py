"""Client and server side of the service that `environment.proto` describes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from mafrt.environment.remote import environment_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["Environment"]


class EnvironmentStub:
    """The service's methods as functions of a request, by a channel."""

    Describe: grpc.UnaryUnaryMultiCallable
    Open: grpc.UnaryUnaryMultiCallable
    Reset: grpc.UnaryUnaryMultiCallable
    Step: grpc.UnaryUnaryMultiCallable
    Close: grpc.UnaryUnaryMultiCallable

    def __init__(self, channel: grpc.Channel) -> None:
        for method in SERVICE.methods:
            request, reply = getattr(pb, method.input_type.name), getattr(pb, method.output_type.name)
            call = channel.unary_unary(
                f"/{SERVICE.full_name}/{method.name}",
                request_serializer=request.SerializeToString,
                response_deserializer=reply.FromString,
            )
            setattr(self, method.name, call)


def serve(servicer: Any, server: Any, as_handler: Callable[[Any, Callable[[bytes], Any]], Any]) -> None:
    """Have a server answer by the methods of `servicer` that have the service's names; others are not implemented.

    `as_handler` makes what gRPC calls with the bytes of a request of a method and of what reads these.
    """
    handlers = {
        method.name: grpc.unary_unary_rpc_method_handler(
            as_handler(getattr(servicer, method.name), getattr(pb, method.input_type.name).FromString),
            response_serializer=getattr(pb, method.output_type.name).SerializeToString,
        )
        for method in SERVICE.methods
        if hasattr(servicer, method.name)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))
