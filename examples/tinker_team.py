"""A team by the Tinker API: an adapter for each agent, rewarded together, on a server of our own.

mafrt serve_tinker --model_name_or_path teaching-base --port 8000
TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-any python examples/tinker_team.py
"""

import sys

import tinker
from tinker import AdamParams, Datum, ModelInput, SamplingParams


def main(steps=10, group=16):
    service = tinker.ServiceClient()
    base = tinker.RestClient().get_server_capabilities().result().supported_models[0].model_name
    team = {name: service.create_lora_training_client(base, rank=8).result() for name in ("reasoner", "actor")}
    tokenizer = team["actor"].get_tokenizer()

    def prompt(text):
        chat = [{"role": "user", "content": text}]
        return tokenizer.encode(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))

    for step in range(steps):
        samplers = {name: client.save_weights_and_get_sampling_client().result() for name, client in team.items()}
        how, problem = (
            SamplingParams(max_tokens=32),
            f"Problem: Mia has {step + 2} pens and gets {step + 3} more. How many?",
        )
        turns, rewards = [], []
        plans = samplers["reasoner"].sample(ModelInput.from_ints(prompt(problem)), group, how).result().sequences
        asked = [prompt(f"{problem}\n\nreasoner: {tokenizer.decode(plan.tokens)}") for plan in plans]
        answers = [samplers["actor"].sample(ModelInput.from_ints(ids), 1, how) for ids in asked]
        for plan, ids, answer in zip(plans, asked, answers, strict=True):
            said = answer.result().sequences[0]
            rewards.append(float(str(2 * step + 5) in tokenizer.decode(said.tokens)))
            turns.append({"reasoner": (prompt(problem), plan), "actor": (ids, said)})
        mean, waiting = sum(rewards) / group, []
        for name, client in team.items():  # both agents learn from the team's reward, in one mixed batch
            data = [datum(*turn[name], reward - mean) for turn, reward in zip(turns, rewards, strict=True)]
            waiting += [client.forward_backward(data, "importance_sampling"), client.optim_step(AdamParams())]
        for future in waiting:
            future.result()
        print(f"{step}: reward {mean:.2f}", flush=True)
    service.close("success").result()


def datum(ids, said, advantage):
    whole, before = [*ids, *said.tokens], [0.0] * (len(ids) - 1)
    inputs = {"logprobs": [*before, *said.logprobs], "advantages": [*before, *[advantage] * len(said.tokens)]}
    return Datum(model_input=ModelInput.from_ints(whole[:-1]), loss_fn_inputs={"target_tokens": whole[1:], **inputs})


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
