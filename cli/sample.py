"""`ptxtrain sample`: text from a trained model, printed as it comes."""

from __future__ import annotations

from pathlib import Path

import click

from ptxtrain.cli.options import device_options

EPILOG = """\b
Examples:
  ptxtrain sample --ckpt runs/tiny-20260131-174501
  ptxtrain sample --ckpt runs/mine/ckpt/step-00001514 --prompt "The best way to learn" --tokens 200
  ptxtrain sample --ckpt runs/mine --prompt "def " --temperature 0
"""


@click.command("sample", epilog=EPILOG)
@click.option(
    "--ckpt", required=True, type=click.Path(path_type=Path), metavar="RUN|CKPT", help="A run, or ckpt/step-… in one."
)
@click.option("--prompt", default="", help="Text to go on from. [default: the start of a document]")
@click.option(
    "--tokens", default=128, show_default=True, type=click.IntRange(1, 1_000_000), help="Tokens to print at most."
)
@click.option("--temperature", default=0.8, show_default=True, help="0 takes the likeliest token each time.")
@click.option("--top-k", default=40, show_default=True, help="Pick among the k likeliest tokens; 0: all.")
@click.option(
    "--top-p", default=1.0, show_default=True, help="Pick among the likeliest that reach this probability; 1: all."
)
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0), help="The same seed gives the same text.")
@device_options
def command(
    ckpt: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    wanted: str | None,
    threads: int | None,
) -> None:
    """Continue a prompt with the model of a run's newest checkpoint, or of one checkpoint.

    Text longer than the model's context T is read through a window: each token is predicted from the last T tokens before it.
    Generation ends early where the model ends the document.
    """
    from ptxtrain.cli.main import say
    from ptxtrain.data.tokenizer import load_tokenizer
    from ptxtrain.engine.checkpoint import load
    from ptxtrain.engine.device.choice import open_device
    from ptxtrain.engine.parameters import parameter_table
    from ptxtrain.engine.rundir import read_info, run_and_step
    from ptxtrain.engine.sampler import Sampling, generate, load_model

    sampling = Sampling(temperature, top_k, top_p, seed)
    info = read_info(run_and_step(ckpt)[0])
    model = info.config.model
    snapshot = load(ckpt, parameter_table(model), note=say)
    tokenizer = load_tokenizer(info.tokenizer, info.tokenizer_sha256)
    device, choice = open_device(wanted, threads)
    say(f"step {snapshot.step} of {info.path} on {device.name} ({choice})")
    logits = load_model(model, device, snapshot.params, info.config.train.way).logits
    start = tokenizer.encode(prompt) if prompt else [tokenizer.end_of_text]
    text = tokenizer.stream()
    click.echo(prompt, nl=False)
    end = tokenizer.end_of_text
    for token in generate(logits, start, context=model.context, tokens=tokens, sampling=sampling, end=end):
        if token != end:
            click.echo(text.push(token), nl=False)
    click.echo(text.flush())
