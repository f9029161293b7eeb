"""The four kinds of text the demo model tells apart: texts that shape its routers, and prompts to try it with."""

from importlib import resources

DOMAINS = ("code", "english", "german", "maths")

PASSAGE_SEPARATOR = "===="

# Chat prompts of each kind that a 135M-parameter model answers passably.
DOMAIN_PROMPTS: dict[str, tuple[str, ...]] = {
    "code": (
        "Write a Python function that returns the largest number in a list.",
        "Write a Python function that checks whether a string is a palindrome.",
        "Write an SQL query that selects all customers from the city of Lisbon.",
        "Write a JavaScript function that reverses an array.",
    ),
    "english": (
        "What is the capital of France?",
        "Write a short story about a lighthouse keeper and a storm.",
        "Why do leaves change their colour in autumn?",
        "Describe a busy market on a Saturday morning.",
    ),
    "german": (
        "Schreibe einen kurzen Text über einen Spaziergang im Wald.",
        "Erzähle mir bitte von der Stadt Berlin und ihrer Geschichte.",
        "Wie ist das Wetter im Winter in Deutschland?",
        "Was ist deine Lieblingsspeise, und warum schmeckt sie dir?",
    ),
    "maths": (
        "What is 12 * 7 + 5? Show each step.",
        "Solve the equation 3x + 4 = 19 for x.",
        "What is the area of a circle with radius 3?",
        "Find the derivative of f(x) = x^3 - 2x + 1.",
    ),
}


def calibration_texts() -> dict[str, list[str]]:
    """Passages of each domain, in the order of `DOMAINS`; written for trimtab, under its licence."""
    folder = resources.files("trimtab.models.demo") / "texts"
    passages = {}
    for domain in DOMAINS:
        text = (folder / f"{domain}.txt").read_text(encoding="utf-8")
        passages[domain] = [part.strip("\n") for part in text.split(f"\n{PASSAGE_SEPARATOR}\n")]
    return passages
