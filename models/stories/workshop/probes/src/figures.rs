//! Measurements and their targets.

use serde_json::{Value, json};

/// Bound that a value must meet.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Target {
    AtLeast(f64),
    AtMost(f64),
}

/// A measurement with an optional target.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Figure {
    pub(crate) name: &'static str,
    pub(crate) value: f64,
    target: Option<Target>,
}

impl Figure {
    /// Creates a measurement without a target.
    pub(crate) fn new(name: &'static str, value: f64) -> Self {
        Self { name, value, target: None }
    }

    pub(crate) fn at_least(self, target: f64) -> Self {
        Self { target: Some(Target::AtLeast(target)), ..self }
    }

    pub(crate) fn at_most(self, target: f64) -> Self {
        Self { target: Some(Target::AtMost(target)), ..self }
    }

    /// Whether the target is met, or `None` without a target.
    pub(crate) fn is_met(&self) -> Option<bool> {
        self.target.map(|target| match target {
            Target::AtLeast(least) => self.value >= least,
            Target::AtMost(most) => self.value <= most,
        })
    }

    /// Whether the target is a lower bound of at most 1, so that the value is a fraction.
    pub(crate) fn is_fraction(&self) -> bool {
        matches!(self.target, Some(Target::AtLeast(least)) if least <= 1.0)
    }

    pub(crate) fn to_json(&self) -> Value {
        let (bound, target) = match self.target {
            Some(Target::AtLeast(least)) => (Some("at least"), Some(least)),
            Some(Target::AtMost(most)) => (Some("at most"), Some(most)),
            None => (None, None),
        };
        json!({ "name": self.name, "value": self.value, "bound": bound, "target": target, "is_met": self.is_met() })
    }
}

/// Formats the measurement as a line of the report.
impl std::fmt::Display for Figure {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{:56} {:9.4}", self.name, self.value)?;
        match self.target {
            Some(Target::AtLeast(least)) => write!(formatter, "  at least {least}")?,
            Some(Target::AtMost(most)) => write!(formatter, "  at most {most}")?,
            None => {}
        }
        if self.is_met() == Some(false) { write!(formatter, "  missed") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_outside_their_target_are_printed_as_missed() {
        let found = |figure: Figure| figure.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(found(Figure::new("he or she", 0.96).at_least(0.95)), "he or she 0.9600 at least 0.95");
        assert_eq!(
            found(Figure::new("he or she", 0.94).at_least(0.95)),
            "he or she 0.9400 at least 0.95 missed"
        );
        assert_eq!(found(Figure::new("loss", 1.3).at_most(1.2)), "loss 1.3000 at most 1.2 missed");
        assert_eq!(found(Figure::new("gzip", 2.56)), "gzip 2.5600");
    }
}
