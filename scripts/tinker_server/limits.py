"""Bounds of the server, and the error of a request that breaks one."""

from __future__ import annotations

from dataclasses import dataclass

from mafrt.environment.local_server import BODY_S, RefusedError


@dataclass(frozen=True)
class Limits:
    """Bounds; those of a client hold for each API key."""

    sessions: int = 64
    """max open sessions of a client"""
    adapters: int = 32
    """max adapters of a client that are in memory as training clients"""
    slots: int = 128
    """max adapters in memory, of all clients: those that train, and those that are sampled from"""
    rank: int = 256
    """max rank of an adapter"""
    batch_tokens: int = 262_144
    """max tokens of one forward or backward request"""
    all_sessions: int = 4096
    """max open sessions of all clients"""
    waiting: int = 8192
    """max samples and other requests of a client that wait; further ones get status 429"""
    waiting_mib: float = 1024.0
    """max MiB of them"""
    kept: int = 8192
    """max results of a client that are kept until they are fetched"""
    kept_mib: float = 1024.0
    """max MiB of them"""
    samples: int = 1024
    """max samples of one request"""
    top: int = 64
    """max likeliest tokens, or tokens to score, of a position"""
    snapshots: int = 64
    """max snapshots of a session that can be sampled from; the oldest is dropped"""
    checkpoints: int = 256
    """max checkpoints of a training run"""
    body_mib: float = 16.0
    """max MiB of a batch to learn from; the SDK cuts its batches at 5. Parsing takes thirty times as much"""
    json_mib: float = 8.0
    """max MiB of any other request"""
    body_s: float = BODY_S
    """max seconds in which a request must arrive"""
    poll_s: float = 20.0
    """seconds that a client waits for a result before it asks again"""
    gap_s: float = 300.0
    """seconds that a request waits for one with a lower number"""
    session_s: float = 3600.0
    """seconds without a sign of life after which a session ends"""
    silent_s: float = 120.0
    """the same where its place is needed; the SDK gives one every 10 s"""
    connections: int = 1024
    """max connections"""


def refused(why: str, status: int = 400) -> RefusedError:
    """The error of a request; 409 and 429 make the SDK ask again, other numbers below 500 do not."""
    return RefusedError(status, why)
