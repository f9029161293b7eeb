"""The demo model: a real-language Mixture-of-Experts built on this machine from a small open model, once.

`ensure_demo()` gives the folder of a genuine `MixtralForCausalLM` checkpoint. It is SmolLM2-135M-Instruct (Apache-2.0)
sparse-upcycled (Komatsuzaki et al. 2022, arXiv:2212.05055): every expert is the dense FFN plus a little noise of its
own, so the text stays that of the dense model, and the routers are cluster centres of what each FFN really sees in
code, English, German and mathematics, so that the load of the experts is truly skewed by what people ask.

- `domains`: the four kinds of text: calibration texts and chat prompts
- `source`: where the dense weights come from
- `dense`: the GGUF file as tensors, tokenizer and chat template
- `routers`: what the FFNs see, and the routers made from it
- `upcycle`: dense model + routers + noise = the checkpoint's files
- `cache`: built once, atomically, found again afterwards
"""

from trimtab.models.demo.cache import DEFAULT_NOISE, ensure_demo
from trimtab.models.demo.domains import DOMAIN_PROMPTS, DOMAINS, calibration_texts
from trimtab.models.demo.source import DemoSourceError

__all__ = ["DEFAULT_NOISE", "DOMAINS", "DOMAIN_PROMPTS", "DemoSourceError", "calibration_texts", "ensure_demo"]
