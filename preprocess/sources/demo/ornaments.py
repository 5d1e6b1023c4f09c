"""Pictures on a receipt that say nothing: logos, stamps, bars and matrix codes. Each is a mask in mode L."""

from random import Random

import numpy as np
from PIL import Image, ImageDraw

from preprocess.sources.demo.glyphs import FaceSpec, face


def bars(rng: Random, width: int, height: int) -> Image.Image:
    """Bars that look like a linear barcode, at most ``width`` pixels wide."""
    unit = max(1, width // 95)
    mask = Image.new("L", (unit * 95, height))
    draw, x, on = ImageDraw.Draw(mask), 0, True
    while x < 95:
        run = min(rng.choice((1, 1, 1, 2, 2, 3)), 95 - x)
        if on:
            draw.rectangle((x * unit, 0, (x + run) * unit - 1, height - 1), fill=255)
        x, on = x + run, not on
    return mask


def matrix(rng: Random, size: int) -> Image.Image:
    """Modules that look like a QR code, at most ``size`` pixels square."""
    side = 25
    modules = Image.new("L", (side, side))
    modules.putdata([255 * rng.getrandbits(1) for _ in range(side * side)])
    draw = ImageDraw.Draw(modules)
    for x, y in ((0, 0), (side - 7, 0), (0, side - 7)):
        draw.rectangle((x - 1, y - 1, x + 7, y + 7), fill=0)
        draw.rectangle((x, y, x + 6, y + 6), outline=255)
        draw.rectangle((x + 2, y + 2, x + 4, y + 4), fill=255)
    unit = max(1, size // side)
    return modules.resize((side * unit, side * unit), Image.Resampling.NEAREST)


def logo(rng: Random, size: int, initial: str) -> Image.Image:
    """A simple emblem, ``size`` pixels square, drawn at four times the size and reduced."""
    big = size * 4
    mask = Image.new("L", (big, big))
    draw, line = ImageDraw.Draw(mask), big // 16
    shape = rng.choice(("disc", "ring", "diamond", "cup", "leaf", "sun"))
    box = (line, line, big - line, big - line)
    if shape in ("disc", "ring", "diamond"):
        if shape == "diamond":
            draw.polygon([(big // 2, 0), (big, big // 2), (big // 2, big), (0, big // 2)], fill=255)
        else:
            draw.ellipse(box, fill=255 if shape == "disc" else 0, outline=255, width=line)
        spec = FaceSpec("sans", big // 2, bold=True)
        letters = face(spec)
        ink = 255 if shape == "ring" else 0
        y = big // 2 - round(spec.size * 0.68)
        sign = np.zeros((big, big), np.uint8)
        letters.draw(sign, (big - letters.length(initial)) // 2, y, initial)
        mask.paste(ink, (0, 0), Image.fromarray(sign))
    elif shape == "cup":
        draw.rectangle((big // 5, big * 2 // 5, big * 7 // 10, big * 7 // 10), fill=255)
        draw.pieslice((big // 5, big // 2, big * 7 // 10, big * 9 // 10), 0, 180, fill=255)
        handle = (big * 3 // 5, big * 9 // 20, big * 17 // 20, big * 7 // 10)
        draw.ellipse(handle, outline=255, width=line)
        draw.line((big // 8, big - line, big * 7 // 8, big - line), fill=255, width=line)
        for x in (3, 5):
            draw.arc((big * x // 10 - line, big // 10, big * x // 10 + line * 2, big * 7 // 20), 90, 300, 255, line)
    elif shape == "leaf":
        draw.chord((0, big // 4, big, big * 5 // 4), 180, 360, fill=255)
        draw.chord((0, -big // 4, big, big * 3 // 4), 0, 180, fill=255)
        draw.line((0, big // 2, big * 4 // 5, big // 2), fill=0, width=line)
        mask = mask.rotate(35)
    else:
        draw.ellipse((big // 3, big // 3, big * 2 // 3, big * 2 // 3), fill=255)
        for turn in range(6):
            ray = Image.new("L", mask.size)
            ImageDraw.Draw(ray).rectangle((big // 2 - line // 2, 0, big // 2 + line // 2, big), fill=255)
            ImageDraw.Draw(ray).rectangle((0, big // 4, big, big * 3 // 4), fill=0)
            mask.paste(255, (0, 0), ray.rotate(turn * 30))
    return mask.reduce(4)


def stamp(rng: Random, text: str, size: int) -> Image.Image:
    """Framed text as if stamped by hand: tilted and unevenly inked."""
    spec = FaceSpec("sans", size, bold=True, stretch=rng.choice((1.0, 1.15)))
    letters, pad = face(spec), size // 2
    width, height = letters.length(text) + 2 * pad, letters.height + pad
    mask = Image.new("L", (width, height))
    draw, line = ImageDraw.Draw(mask), max(2, size // 9)
    draw.rounded_rectangle((0, 0, width - 1, height - 1), radius=size // 3, outline=255, width=line)
    sign = np.zeros((height, width), np.uint8)
    letters.draw(sign, pad, pad // 2 - size // 16, text)
    mask.paste(255, (0, 0), Image.fromarray(sign))
    # Thin spots, coarse enough to be seen.
    spots = Image.new("L", (max(2, width // 12), max(2, height // 12)))
    spots.putdata([rng.randrange(120, 256) for _ in range(spots.width * spots.height)])
    worn = spots.resize(mask.size, Image.Resampling.BICUBIC)
    inked = Image.composite(worn, Image.new("L", mask.size), mask)
    return inked.rotate(rng.uniform(-9, 9), Image.Resampling.BICUBIC, expand=True)
