"""Real prompts for comparing tokens across implementations. Each was chosen because greedy decoding is never close.

The gap between the two best logits, in float32 on the built-in model, is at least MIN_GAP in the first tokens of
each answer; `test_stages_agree` measures it again in every session.
"""

from __future__ import annotations

MIN_GAP = 0.04

ORBIT = (
    "The sun rises in the east and sets in the west. The moon moves around the Earth, and the Earth moves around the "
    "sun. It takes one year for the Earth to go around the sun, and one month for the moon to go around the Earth."
)
CHINESE = (
    "北京是中国的首都，也是全国的政治和文化中心。这座城市有三千多年的历史，故宫和长城每年吸引着来自世界各地的游客。"
)
CODE = (
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\n\n"
    "def factorial(n):\n    if n == 0:\n"
)
EMOJI = "I love pizza 🍕 and ice cream 🍦! My favourite animals are 🐶 dogs and 🐱 cats, because"
PLANETS = "Planets of the solar system in order: Mercury, Venus, Earth, Mars,"
TEXTS = (CHINESE, CODE, EMOJI, PLANETS)
LENGTHS = (15, 16, 17, 31, 32, 33, 48)  # of ORBIT, around the borders of 16-token pages and 32-token chunks
