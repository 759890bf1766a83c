"""Environments in other processes and on other machines, over gRPC (the extra [grpc])."""
