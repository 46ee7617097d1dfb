"""The planner page: its assets, its HTML, and the server of `toolkit page`.

What computes is `toolkit.cli.page.reply`, here in Python, and in a static page in the browser's (`docs/site/page/`).
"""
