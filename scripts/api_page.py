#!/usr/bin/env python3
"""Write docs/api.md from the field tables. Run it after a field has changed; a test compares."""

from pathlib import Path

from jaxserve.openai.pages import api_page

PAGE = Path(__file__).parents[1] / "docs/api.md"

if __name__ == "__main__":
    PAGE.write_text(api_page(), encoding="utf-8")
