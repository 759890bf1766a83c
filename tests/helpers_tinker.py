"""A client of the Tinker API by the standard library alone, and a server of a tiny base."""

from __future__ import annotations

import http.client
import itertools
import json
import uuid
from typing import Any

import numpy as np

from mafrt.scripts.tinker_server import wire_pb2 as wire
from mafrt.scripts.tinker_server.checkpoints import Checkpoints
from mafrt.scripts.tinker_server.limits import Limits
from mafrt.scripts.tinker_server.server import TinkerServer
from mafrt.scripts.tinker_server.service import Service

PROTOBUF = "application/x-protobuf"
LIMITS = Limits()


def serving(base: Any, folder: Any, *, tokens: tuple[str, ...] = (), limits: Limits = LIMITS, **more: Any) -> Any:
    server = TinkerServer(tokens=tokens, limits=limits)
    server.service = Service(base, ["tiny"], "tiny", Checkpoints(folder, limits.checkpoints), limits, **more)
    return server


class RefusedByServerError(Exception):
    def __init__(self, status: int, why: str) -> None:
        super().__init__(f"{status}: {why}")
        self.status = status


class Client:
    """One API key, a session, and what the SDK does with them."""

    def __init__(self, server: Any, key: str = "tml-one", *, session: bool = True) -> None:
        self.port, self.key = server.port, key
        self.session = self.post("create_session", {"tags": [], "sdk_version": "0"})["session_id"] if session else ""
        self.seqs: dict[str, int] = {}
        self.samplers = self.models = 0

    def raw(
        self, method: str, path: str, content: bytes | None = None, kind: str = "application/json", **headers: str
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            given = {"X-API-Key": self.key, **({"Content-Type": kind} if content is not None else {}), **headers}
            connection.request(method, f"/api/v1/{path}", content, given)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def call(self, method: str, path: str, content: bytes | None = None, kind: str = "application/json") -> bytes:
        status, body = self.raw(method, path, content, kind)
        if status >= 300:
            raise RefusedByServerError(status, body.decode())
        return body

    def post(self, path: str, body: Any) -> Any:
        return json.loads(self.call("POST", path, json.dumps(body).encode()))

    def get(self, path: str) -> Any:
        return json.loads(self.call("GET", path))

    def fetch(self, request: str) -> Any:
        """The result of a request: bytes of a protocol buffer, or JSON. Raises RuntimeError if the request failed."""
        while True:
            status, body = self.raw("POST", "retrieve_future", json.dumps({"request_id": request}).encode())
            if status == 408:
                continue
            if status >= 300:
                raise RefusedByServerError(status, body.decode())
            if not body.startswith(b"{"):
                return body
            found = json.loads(body)
            if "error" in found:
                raise RuntimeError(f"{found['category']}: {found['error']}")
            return found

    # ------------------------------------------------------------------------------------------------------- requests

    def model(self, rank: int = 4, *, seed: int = 1, **more: Any) -> str:
        number, self.models = self.models, self.models + 1
        body = {"session_id": self.session, "model_seq_id": number, "base_model": "tiny"}
        lora = {"rank": rank, "seed": seed, **more}
        return self.fetch(self.post("create_model", {**body, "lora_config": lora})["request_id"])["model_id"]

    def from_state(self, path: str, *, optimizer: bool = True) -> str:
        number, self.models = self.models, self.models + 1
        body = {"session_id": self.session, "model_seq_id": number, "path": path, "optimizer": optimizer}
        return self.fetch(self.post("load_weights", body)["request_id"])["model_id"]

    def seq(self, model: str) -> int:
        self.seqs[model] = self.seqs.get(model, 0) + 1
        return self.seqs[model]

    def begin_pass(self, message: wire.ForwardBackwardRequest) -> str:
        content = message.SerializeToString()
        return json.loads(self.call("POST", "forward_backward", content, PROTOBUF))["request_id"]

    def learn(self, model: str, data: list[wire.Datum], loss: str = "cross_entropy", **more: Any) -> Any:
        return output(self.fetch(self.begin_pass(self.message(model, data, loss, **more))))

    def message(
        self, model: str, data: list[wire.Datum], loss: str = "cross_entropy", *, backward: bool = True, **config: float
    ) -> wire.ForwardBackwardRequest:
        made = wire.ForwardBackwardRequest(model_id=model, seq_id=self.seq(model), data=data, loss_fn=loss)
        made.forward_only = not backward
        made.loss_fn_config.update(config)
        return made

    def step(self, model: str, **adam: float) -> dict[str, float]:
        body = {"model_id": model, "seq_id": self.seq(model), "adam_params": adam}
        return self.fetch(self.post("optim_step", body)["request_id"])["metrics"]

    def save(self, model: str, name: str, kind: str = "save_weights", **more: Any) -> str:
        body = {"model_id": model, "seq_id": self.seq(model), "path": name, **more}
        return self.fetch(self.post(kind, body)["request_id"])["path"]

    def snapshot(self, model: str) -> str:
        number, self.samplers = self.samplers, self.samplers + 1
        body = {"model_id": model, "seq_id": self.seq(model), "sampling_session_seq_id": number}
        return self.fetch(self.post("save_weights_for_sampler", body)["request_id"])["sampling_session_id"]

    def sampler(self, **of: Any) -> str:
        number, self.samplers = self.samplers, self.samplers + 1
        body = {"session_id": self.session, "sampling_session_seq_id": number, **(of or {"base_model": "tiny"})}
        return self.post("create_sampling_session", body)["sampling_session_id"]

    def asample(self, sampler: str, prompt: list[int], samples: int = 1, *, params: Any = None, **more: Any) -> Any:
        body = {
            "sampling_session_id": sampler,
            "seq_id": self.seq(sampler),
            "num_samples": samples,
            "prompt": {"chunks": [{"tokens": prompt, "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 6, **(params or {})},
            **more,
        }
        return self.post("asample", body)

    def sample(self, sampler: str, prompt: list[int], samples: int = 1, **more: Any) -> wire.SampleResponse:
        made = wire.SampleResponse()
        made.ParseFromString(self.fetch(self.asample(sampler, prompt, samples, **more)["request_id"]))
        return made


def tensor(values: Any, dtype: Any = np.float32) -> wire.Tensor:
    found = np.asarray(values, dtype)
    kind = wire.INT64 if found.dtype == np.int64 else wire.FLOAT32
    return wire.Tensor(dense=found.tobytes(), dtype=kind, shape=found.shape)


def datum(tokens: list[int], targets: Any, **inputs: Any) -> wire.Datum:
    made = wire.Datum()
    made.model_input.add().encoded_text.tokens = np.array(tokens, np.int32).tobytes()
    made.loss_fn_inputs["target_tokens"].CopyFrom(tensor(targets, np.int64))
    for name, values in inputs.items():
        made.loss_fn_inputs[name].CopyFrom(tensor(values))
    return made


def output(content: bytes) -> tuple[float, list[np.ndarray]]:
    """Loss, and log-probabilities of each example."""
    found = wire.ForwardBackwardOutput()
    found.ParseFromString(content)
    values: list[np.ndarray] = []
    for record in found.loss_fn_outputs:
        part = record.fields["logprobs"]
        offsets = np.frombuffer(part.offsets, np.int64) // 4
        flat = np.frombuffer(part.data, np.float32)
        for start, stop in itertools.pairwise(offsets):
            values.append(flat[start:stop].reshape(-1, *part.trailing_shape))
    return found.metrics["loss:sum"], values


def ids(text: np.ndarray) -> list[int]:
    return np.frombuffer(text, np.int32).tolist()


def new_key() -> str:
    return f"tml-{uuid.uuid4().hex}"
