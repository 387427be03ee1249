"""What a person does on the chat page, as functions."""

from __future__ import annotations

from typing import Any

WORDS = (
    *("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"),
    *("lambda", "mu", "nu", "xi", "omicron", "pi", "rho", "sigma", "tau", "upsilon"),
)


def counted(n: int) -> str:
    """A text whose every word says where it stands: a gap or a repetition shows."""
    return " ".join(f"{WORDS[i % len(WORDS)]}{i}" for i in range(n))


def ask(page: Any, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")


def say(page: Any, answer: str, question: str = "Say it.") -> None:
    """Ask the scripted model for a certain answer."""
    ask(page, f"{question} [[say:{answer}]]")


def last_answer(page: Any) -> Any:
    return page.locator(".message.answer").last


def wait_text(page: Any, text: str, timeout: float = 15_000) -> None:
    page.wait_for_function(
        "text => [...document.querySelectorAll('.message.answer .content')].at(-1)?.textContent.includes(text)",
        arg=text,
        timeout=timeout,
    )


def wait_done(page: Any, timeout: float = 30_000) -> Any:
    """The last answer, once nothing more comes."""
    page.wait_for_function(
        "() => { const last = [...document.querySelectorAll('.message.answer')].at(-1);"
        " return last && last.dataset.id && !last.classList.contains('live'); }",
        timeout=timeout,
    )
    return last_answer(page)


def answer_text(page: Any) -> str:
    return last_answer(page).locator(".content").inner_text().strip()
