"""The environment of a rank as its launcher gives it, as JSON, without any import.

accelerate launch ... rank_environment.py PREFIX       # writes PREFIX0.json, PREFIX1.json, one per rank
"""

import json
import os
import sys
from pathlib import Path

Path(f"{sys.argv[1]}{os.environ.get('RANK', '0')}.json").write_text(json.dumps(dict(os.environ)))
