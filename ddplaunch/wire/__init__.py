"""Communication between ddplaunch's processes: frames, validated messages, token proofs, helper processes."""
