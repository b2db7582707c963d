"""Argument names of other libraries, for the hints of errors about unknown arguments."""

from __future__ import annotations

from collections.abc import Collection

_BEAMS = "answers are greedy or sampled; <<beam_search>>"
_ITEMS = "<<items_in_messages>>"
_LENGTH = "audio of any length is read; the engine chooses the windows"

# another library's name -> candidates for the hint, in order: names of ours, of which the call must have one, or a sentence
_NAMES: dict[str, tuple[str, ...]] = {
    # transformers, OpenAI, llama.cpp: sampling
    "max_new_tokens": ("max_tokens", "give sampling_params=SamplingParams(max_tokens=...)"),
    "max_completion_tokens": ("max_tokens",),
    "max_output_tokens": ("max_tokens",),
    "max_gen_len": ("max_tokens",),
    "num_predict": ("max_tokens",),
    "n_predict": ("max_tokens",),
    "max_length": ("max_tokens", "max_model_len"),
    "min_new_tokens": ("min_tokens",),
    "min_length": ("min_tokens",),
    "do_sample": ("do_sample=False is temperature=0",),
    "num_return_sequences": ("n",),
    "stop_sequences": ("stop",),
    "stop_strings": ("stop",),
    "stop_words": ("stop",),
    "stopping_criteria": ("stop",),
    "eos_token_id": ("stop_token_ids",),
    "bad_words_ids": ("bad_words",),
    "no_repeat_ngram_size": ("repetition_detection",),
    "repeat_penalty": ("repetition_penalty",),
    "top_logprobs": ("logprobs",),
    "response_format": ("structured_outputs",),
    "guided_json": ("structured_outputs",),
    "guided_regex": ("structured_outputs",),
    "guided_choice": ("structured_outputs",),
    "guided_grammar": ("structured_outputs",),
    "json_schema": ("structured_outputs",),
    "num_beams": ("beam_size", "beam_width", _BEAMS),
    "beam_size": ("beam_width", _BEAMS),
    "best_of": ("beam_size", "ask for n answers and choose among them"),
    "use_beam_search": (_BEAMS,),
    "early_stopping": (_BEAMS,),
    "length_penalty": (_BEAMS,),
    "generate_kwargs": ("sampling_params",),
    "input_ids": ("prompt_token_ids",),
    "images": (_ITEMS,),
    "videos": (_ITEMS,),
    "audios": (_ITEMS,),
    "generation_kwargs": ("sampling_params",),
    "generation_config": ("sampling_params",),
    # transformers, faster-whisper, llama.cpp: engines
    "model_name": ("model",),
    "model_path": ("model",),
    "model_id": ("model",),
    "model_name_or_path": ("model",),
    "pretrained_model_name_or_path": ("model",),
    "model_size_or_path": ("model",),
    "torch_dtype": ("dtype",),
    "compute_type": ("dtype",),
    "precision": ("dtype",),
    "device_map": ("device",),
    "device_index": ("device",),
    "n_gpu_layers": ("device",),
    "num_gpus": ("tensor_parallel_size",),
    "n_gpu": ("tensor_parallel_size",),
    "max_seq_len": ("max_model_len",),
    "max_seq_length": ("max_model_len",),
    "context_length": ("max_model_len",),
    "n_ctx": ("max_model_len",),
    "load_in_8bit": ("quantization", 'give quantization="int8"'),
    "load_in_4bit": ("quantization", 'give quantization="int4"'),
    "attn_implementation": ("kernels",),
    "batch_size": ("max_num_seqs", "all inputs of a call run as one batch"),
    "token": ("set the environment variable HF_TOKEN",),
    "use_auth_token": ("set the environment variable HF_TOKEN",),
    "cache_dir": ("set the environment variable HF_HUB_CACHE",),
    "download_root": ("set the environment variable HF_HUB_CACHE",),
    "local_files_only": ("offline",),
    "cpu_threads": ("set the environment variable OMP_NUM_THREADS",),
    "num_threads": ("set the environment variable OMP_NUM_THREADS",),
    "n_threads": ("set the environment variable OMP_NUM_THREADS",),
    "num_workers": ("media_workers", "all inputs of a call run as one batch"),
    # transformers, faster-whisper, Whisper, sentence-transformers: tasks
    "return_timestamps": ("timestamps",),
    "without_timestamps": ("timestamps",),
    "word_timestamps": ("<<word_times>>",),
    "initial_prompt": ("prompt",),
    "prefix": ("prompt",),
    "suppress_tokens": ("tokens that the checkpoint suppresses always are",),
    "suppress_blank": ("tokens that the checkpoint suppresses first always are",),
    "clip_timestamps": ("cut the samples",),
    "hallucination_silence_threshold": ("vad leaves out silence",),
    "vad_filter": ("vad",),
    "vad_parameters": ("vad",),
    "chunk_length_s": (_LENGTH,),
    "chunk_length": (_LENGTH,),
    "normalize_embeddings": ("normalize", "<<vector_length>>"),
    "convert_to_tensor": ("each result has its vector as a tensor",),
    "truncate_dim": ("dimensions",),
    "prompt_name": ("instruction",),
    "show_progress_bar": ("use_tqdm",),
    # Anthropic, OpenAI's Responses: types of parts
    "tool_use": ('give tool calls as the "tool_calls" of a message',),
    "function_call": ('give tool calls as the "tool_calls" of a message',),
    "tool_result": ('give tool results as messages with the role "tool"',),
    "function_call_output": ('give tool results as messages with the role "tool"',),
}


def advice_about(name: str, names: Collection[str]) -> str:
    """Return a suggestion such as "did you mean max_tokens?" for another library's argument, or ""."""
    for other in _NAMES.get(name, ()):
        if other in names:
            return f"did you mean {other}?"
        if " " in other or "<<" in other:
            return other
    return ""
