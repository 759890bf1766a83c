"""Serve a trained team and talk to it with the stock openai client, streaming included.

    python examples/serve_and_chat.py runs/NAME

The same as two commands: `mafrt serve_team runs/NAME`, and any OpenAI client.
"""

import re
import subprocess
import sys

from openai import OpenAI


def main(run):
    command = [sys.executable, "-m", "mafrt.scripts.serve_team", str(run), "--port", "0", "--threads", "1"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+/v1", line)))
        with OpenAI(base_url=address, api_key="not needed on loopback") as client:
            print("models:", [model.id for model in client.models.list()])
            messages = [{"role": "user", "content": "Problem: Tom has 3 pens and gets 4 more. How many pens has he?"}]
            for chunk in client.chat.completions.create(model="actor", messages=messages, stream=True):
                print(chunk.choices[0].delta.content or "", end="", flush=True)
            print()
            reply = client.chat.completions.create(model="team", messages=messages)  # the whole workflow
            print("team:", reply.choices[0].message.content, reply.usage.completion_tokens, "tokens")
    finally:
        server.terminate()
        server.wait(timeout=30)


if __name__ == "__main__":
    main(sys.argv[1])
