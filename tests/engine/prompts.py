"""Twenty varied prompts: chat and plain, English, code, CJK, emoji, short and long."""

CHATS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in one sentence why the sky is blue.",
    "List three uses for a paper clip.",
    "Translate 'good morning' into Spanish and German.",
    "What is 17 + 25? Think step by step.",
    "请用一句话介绍北京。",
    "日本の首都はどこですか?",
    "한국어로 자기소개를 해 주세요.",
    "Give me a recipe with 🍅, 🧀 and 🌶️.",
]
PLAIN = [
    "The quick brown fox",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a land far away,",
    "import numpy as np\n\ndef softmax(x):\n",
    "SELECT name, COUNT(*) FROM users WHERE",
    "1, 1, 2, 3, 5, 8, 13,",
    "Liberté, égalité,",
    "こんにちは、",
    "👋🌍 Hello, world! 🎉",
    " ".join(f"Item {number} of the inventory is a box of {number * 7} screws." for number in range(1, 31)),
]
