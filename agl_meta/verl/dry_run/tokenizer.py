"""A tokenizer that needs no download: one token a byte, so that any text survives."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import tempfile
from typing import Any

# The form that Qwen and many others use.
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def can_be_loaded(path: Any, *, trust_remote_code: bool = False) -> bool:
    """Whether a tokenizer can be had at ``path`` (a folder or a cached model) without the network.

    Args:
        path: as in ``actor_rollout_ref.model.path``.
        trust_remote_code: as verl passes it. Left out, transformers would ask on the terminal.
    """
    from huggingface_hub import snapshot_download
    from transformers import AutoTokenizer

    try:
        # Given the name of a cached model, transformers 4.57 asks the hub about it even with
        # local_files_only; given the folder, it does not.
        folder = path
        if not os.path.isdir(path):
            folder = snapshot_download(path, local_files_only=True)
        AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception:
        return False
    return True


@functools.cache
def temporary_tokenizer() -> str:
    """Build the tokenizer in a folder that lasts as long as this process; gives its path."""
    folder = tempfile.mkdtemp(prefix="agl_meta-tokenizer-")
    atexit.register(_remove, folder, os.getpid())
    build_tokenizer(folder)
    return folder


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not when a process that was forked from the owner exits
        shutil.rmtree(folder, ignore_errors=True)


def build_tokenizer(folder: str) -> None:
    """Write a byte-level tokenizer with a chat template, and the model config that verl wants."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {byte: n for n, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(folder)
    # No weights belong to it; verl and transformers only read what kind of model it is.
    model = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": len(fast),
    }
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(model, file)
