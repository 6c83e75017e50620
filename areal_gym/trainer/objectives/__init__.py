"""Objectives on fixed data (sft, dpo, reward models), and distillation from a teacher."""
