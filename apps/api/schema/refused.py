"""Parameters of OpenAI's API that are known here and refused by name, with the reason.

``null`` is accepted for each of them, as "absent": clients that send every
field of their model object would otherwise be turned away for nothing.
"""

from __future__ import annotations

REFUSED: dict[str, str] = {
    "access_programs": "there are none.",
    "audio": "no model here speaks.",
    "background": "use /v1/chat/completions with resumable: true, and read /v1/requests/{id}/events.",
    "background_options": "use /v1/chat/completions with resumable: true, and read /v1/requests/{id}/events.",
    "context_management": "conversations are sent in full.",
    "conversation": "conversations are sent in full, or continued with previous_response_id.",
    "function_call": "it is deprecated; use tool_choice, and tool_calls in messages.",
    "functions": "it is deprecated; use tools.",
    "image": "no model here makes images.",
    "include": "there is nothing more to include.",
    "max_tokens": "the name is max_output_tokens here.",
    "max_tool_calls": "there are no built-in tools.",
    "moderation": "answers are not moderated.",
    "prediction": "predicted outputs are not offered.",
    "prompt_cache_options": "the prefix cache works by itself.",
    "prompt_cache_retention": "the prefix cache works by itself.",
    "prompt": "there are no stored prompts.",
    "reasoning": "no effort can be set; use chat_template_kwargs where the model's template has a switch.",
    "reasoning_effort": "no effort can be set; use chat_template_kwargs where the model's template has a switch.",
    "resumable": "use /v1/chat/completions.",
    "suffix": "no model here fills in the middle.",
    "top_logprobs": "use /v1/chat/completions.",
    "verbosity": "say in the prompt how long the answer should be, or limit its tokens.",
    "web_search_options": "there is no web search.",
}

NO_EFFECT: dict[str, str] = {
    "metadata": "accepted for your own bookkeeping; not stored and not returned, since answers are not stored",
    "user": "accepted; the API key already says who is asking",
    "safety_identifier": "accepted; the API key already says who is asking",
    "prompt_cache_key": "accepted; the prefix cache finds shared prefixes by itself",
    "store": "false only: answers are not stored",
    "service_tier": "auto or default only: there is one tier",
    "modalities": '["text"] only',
}
