"""A tokenizer for torchtune's recipes that reads any `tokenizer.json` and adds no token in front.

torchtune 0.6.1 has tokenizers of given models, and a general one that lacks what its recipes ask for (`pad_id`,
`max_seq_len`) and always begins with a BOS token, which the other programs do not add.
"""

from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer


class TextTokenizer(HuggingFaceBaseTokenizer):
    max_seq_len = None
    pad_id = 0

    def encode(self, text, add_bos=True, add_eos=True):
        return super().encode(text, add_bos=False, add_eos=add_eos)
