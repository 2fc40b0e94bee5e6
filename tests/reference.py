# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""DLite's formulas once more: NumPy, float64, one sample at a time, explicit loops, nothing of `dlite_hf`."""

import numpy as np


def rms_norm(vector, gain, eps):
    return gain * vector / np.sqrt(np.mean(vector * vector) + eps)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def linear(weights, name, vector):
    return weights[f"{name}.weight"] @ vector + weights.get(f"{name}.bias", 0.0)


def rotate(vector, position, theta):
    """Element i and element i + half are the plane that turns by position * theta ** (-2i / size)."""
    half = len(vector) // 2
    rotated = np.empty_like(vector)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(vector))
        rotated[i] = vector[i] * np.cos(angle) - vector[i + half] * np.sin(angle)
        rotated[i + half] = vector[i + half] * np.cos(angle) + vector[i] * np.sin(angle)
    return rotated


def attention(weights, name, config, queries_from, query_positions, keys_from, key_positions):
    size, eps, theta = config.head_dim, config.rms_norm_eps, config.rope_parameters["rope_theta"]
    heads_per_key = config.num_attention_heads // config.num_key_value_heads

    keys, values = [], []
    for vector, position in zip(keys_from, key_positions, strict=True):
        key, value = linear(weights, f"{name}.k_proj", vector), linear(weights, f"{name}.v_proj", vector)
        keys.append([])
        values.append([])
        for head in range(config.num_key_value_heads):
            part = slice(head * size, (head + 1) * size)
            keys[-1].append(rotate(rms_norm(key[part], weights[f"{name}.k_norm.weight"], eps), position, theta))
            values[-1].append(value[part])

    outputs = []
    for vector, position in zip(queries_from, query_positions, strict=True):
        query, output = linear(weights, f"{name}.q_proj", vector), []
        for head in range(config.num_attention_heads):
            part = slice(head * size, (head + 1) * size)
            q = rotate(rms_norm(query[part], weights[f"{name}.q_norm.weight"], eps), position, theta)
            shared = head // heads_per_key
            scores = np.array([q @ key[shared] for key in keys]) / np.sqrt(size)
            probabilities = np.exp(scores - scores.max())
            probabilities /= probabilities.sum()
            output.append(sum(p * value[shared] for p, value in zip(probabilities, values, strict=True)))
        outputs.append(linear(weights, f"{name}.o_proj", np.concatenate(output)))
    return outputs


def backbone(weights, config, features, embeddings, group_size, history=None):
    """h_1..h_K from the pivot's hidden states [S, H] and the embeddings [G + K, H] of real tokens and placeholders.

    `history` is a sequence's hidden states [T, M, H] and the anchor's position in it, for a drafter with a window.
    """
    eps = config.rms_norm_eps
    context = []
    if "context_fuse.weight" in weights:
        context.append(
            rms_norm(linear(weights, "context_fuse", features.ravel()), weights["context_norm.weight"], eps)
        )
    else:
        for slot, layer_id in enumerate(config.target_layer_ids):
            sum_ = features[slot] + weights["layer_depth_embedding.weight"][layer_id]
            context.append(rms_norm(sum_, weights["context_norm.weight"], eps))
    context_positions = [max(group_size - 2, 0)] * len(context)
    positions = list(range(len(embeddings)))
    if history is not None:
        history_features, anchor = history
        window = range(max(0, anchor - config.history_window), anchor - 1)
        fused = [linear(weights, "history_fuse", history_features[t].ravel()) for t in window]
        context_positions = [*window, *[anchor - 1] * len(context)]
        context = [rms_norm(slot, weights["history_norm.weight"], eps) for slot in fused] + context
        positions = [anchor - group_size + 1 + n for n in range(len(embeddings))]

    states = list(embeddings)
    for i in range(config.num_hidden_layers):
        layer = f"layers.{i}"
        normed = [rms_norm(x, weights[f"{layer}.input_layernorm.weight"], eps) for x in states]
        attended = attention(
            weights, f"{layer}.self_attn", config, normed, positions, context + normed, context_positions + positions
        )
        for n, output in enumerate(attended):
            x = states[n] + output
            y = rms_norm(x, weights[f"{layer}.post_attention_layernorm.weight"], eps)
            gate, up = linear(weights, f"{layer}.mlp.gate_proj", y), linear(weights, f"{layer}.mlp.up_proj", y)
            states[n] = x + linear(weights, f"{layer}.mlp.down_proj", gate * sigmoid(gate) * up)
    return np.array([rms_norm(x, weights["norm.weight"], eps) for x in states[group_size:]])


def next_state(weights, state, token):
    embedding = weights["sequential_head.prev_token_embedding.weight"][token]
    both = linear(weights, "sequential_head.state_proj", np.concatenate([state, embedding]))
    gate, candidate = sigmoid(both[: len(state)]), np.tanh(both[len(state) :])
    return gate * state + (1 - gate) * candidate


def sequential_head(weights, hidden_states, previous_tokens, forced_tokens=None):
    """u_1..u_K, the logits and their argmax; the head reads `forced_tokens`, else its own argmax."""
    state = np.zeros(weights["sequential_head.output_proj.weight"].shape[1])
    if len(previous_tokens) == 2:
        state = next_state(weights, state, previous_tokens[0])
    token, head_states, all_logits, drafted = previous_tokens[-1], [], [], []
    for k, hidden_state in enumerate(hidden_states):
        state = next_state(weights, state, token)
        merged = linear(weights, "sequential_head.state_hidden_mlp", np.concatenate([state, hidden_state]))
        logits = weights["sequential_head.output_proj.weight"] @ merged
        head_states.append(merged)
        all_logits.append(logits)
        drafted.append(int(logits.argmax()))
        token = drafted[-1] if forced_tokens is None else forced_tokens[k]
    return np.array(head_states), np.array(all_logits), np.array(drafted)


def reference(
    weights, config, context_features, inputs_embeds, previous_token_ids, draft_token_ids=None, history=None
):
    """(last hidden state, head states, logits, drafted ids) of a batch; `weights` and the rest are NumPy arrays.

    `history` has one pair for every sample, see `backbone`.
    """
    results = []
    for n, previous_tokens in enumerate(previous_token_ids):
        own = None if history is None else history[n]
        hidden_states = backbone(weights, config, context_features[n], inputs_embeds[n], len(previous_tokens), own)
        forced_tokens = None if draft_token_ids is None else draft_token_ids[n]
        results.append((hidden_states, *sequential_head(weights, hidden_states, previous_tokens, forced_tokens)))
    return tuple(np.stack(parts) for parts in zip(*results, strict=True))
