"""Forty prompts of many kinds, for comparisons of whole texts."""

PROMPTS = (
    "The capital of France is", "Once upon a time", "def fibonacci(n):", "The quick brown fox jumps over",
    "In 1969, humans first", "To make a good cup of coffee, you", "The three laws of thermodynamics are",
    "Q: What is the tallest mountain?\nA:", "import numpy as np\n\n", "Roses are red, violets are",
    "The mitochondria is", "Dear Sir or Madam,", "List of fruits: apple, banana,", "2 + 2 = 4, 3 + 3 = 6, 4 + 4 =",
    "Water boils at", "The president of the United States lives in", "El perro corre por",
    "Der schnellste Weg nach Berlin",
    "<html>\n<head>\n<title>", "SELECT name, age FROM users WHERE", "Photosynthesis is the process by which",
    "My favourite book is", "The sum of the angles of a triangle is", "# Shopping list\n\n- milk\n- eggs\n-",
    "Why is the sky blue?", "A haiku about autumn:", "The Roman Empire fell because", "for (int i = 0; i < n; i++) {",
    "Breaking news: scientists have discovered", "Mix the flour, the sugar and", "She opened the door and saw",
    "According to the theory of relativity,", "Python is a programming language that", "一二三四五",
    "Le petit chat est",
    "The stock market crashed in", "If it rains tomorrow, I will", "JSON example: {\"name\":",
    "Once the treaty was signed,",
    "An electron has a negative",
)  # fmt: skip
assert len(set(PROMPTS)) == 40
