"""Export: a trained model as a file that PyTorch or an ONNX runtime opens without fpfl.

What is exported is a `Predictor`: scores *and* predictions, as fpfl itself makes them from the
model's logits. A file is written after it was opened again and gave the model's own answers to
made-up inputs; one that does not is never left behind.
"""

from fpfl.exporting.export import export_onnx, export_torch, metadata, needed
from fpfl.exporting.predictor import Predictor, Ranges

__all__ = ["Predictor", "Ranges", "export_onnx", "export_torch", "metadata", "needed"]
