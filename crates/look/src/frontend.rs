//! Feature numbers in circuit-tracer's frontend.

/// Cantor pairing of layer and feature, circuit-tracer's number for a feature.
pub(crate) fn cantor_pair(layer: usize, feature: usize) -> usize {
    (layer + feature) * (layer + feature + 1) / 2 + feature
}
