"""The planner page: its HTML, and the server of `toolkit page`. Its assets are in `docs/site/page/assets`.

What computes is `toolkit.cli.page.reply`, here in Python, and in a static page in the browser's (`docs/site/page/`).
"""
