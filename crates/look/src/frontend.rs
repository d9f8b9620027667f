//! Names in circuit-tracer's frontend.

/// Cantor's number of a pair: what circuit-tracer's frontend calls a feature of a layer.
pub(crate) fn paired(layer: usize, feature: usize) -> usize {
    (layer + feature) * (layer + feature + 1) / 2 + feature
}
