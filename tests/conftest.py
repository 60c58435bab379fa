import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")        # no test needs a network
os.environ.setdefault("OMP_NUM_THREADS", "1")       # beside another busy process two threads are slower than one
sys.path.insert(0, str(Path(__file__).parent.parent))
