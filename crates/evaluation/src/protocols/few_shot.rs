//! Few-shot examples, sampled and joined as in lm-evaluation-harness.
//!
//! # Source
//! lm-evaluation-harness 0.4.13, `api/samplers.py` and `api/task.py` (`fewshot_context`); CPython,
//! `Lib/random.py` (`sample`, `_randbelow_with_getrandbits`) and `Modules/_randommodule.c`
//! (`random_seed`).

use rand_mt::Mt;

use crate::{Data, EvaluationError, ExampleSource, Record, Setting, Shots};

/// Largest pool that Python copies to sample up to 5 examples; more examples raise this size.
const SMALLEST_POOL: usize = 21;

/// Method of choosing examples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Sampler {
    /// Random examples, different ones for each question.
    #[default]
    Random,
    /// The first examples in the pool.
    FirstN,
}

/// Pool of examples, with the method of choosing from it.
pub(super) struct Pool {
    pub(super) records: Vec<Record>,
    pub(super) sampler: Sampler,
    /// Whether the question itself is excluded.
    pub(super) excludes: bool,
}

/// Sampler for a run's examples; one random number sequence covers all questions.
pub(super) struct Examples {
    pool: Pool,
    count: usize,
    random: PythonRandom,
}

impl Examples {
    /// Creates the sampler for a protocol; `None` if the run uses no examples.
    pub(super) fn of_protocol(data: &Data, setting: &Setting<'_>) -> Result<Option<Self>, EvaluationError> {
        let Some(shots) = setting.shots else { return Ok(None) };
        let excludes = match shots.source {
            ExampleSource::Items => false,
            ExampleSource::Training => shots.data.is_none(),
            ExampleSource::TrainingWithoutQuestion => true,
        };
        let records = shots.data.unwrap_or(data).records().collect::<Result<_, _>>()?;
        Ok(Some(Self::new(Pool { records, sampler: Sampler::Random, excludes }, &shots)))
    }

    pub(super) fn new(pool: Pool, shots: &Shots<'_>) -> Self {
        Self { pool, count: shots.count, random: PythonRandom::new(shots.seed) }
    }

    /// Returns the examples that precede this question, rendered by `text` and joined.
    pub(super) fn before<E: From<EvaluationError>>(
        &mut self,
        question: &Record,
        text: impl Fn(&Record) -> Result<String, E>,
    ) -> Result<String, E> {
        let chosen = self.draw(question)?;
        chosen.into_iter().map(|index| text(&self.pool.records[index])).collect()
    }

    fn draw(&mut self, question: &Record) -> Result<Vec<usize>, EvaluationError> {
        let Pool { records, sampler, excludes } = &self.pool;
        let is_other = |index: &usize| !excludes || !records[*index].has_the_fields_of(question);
        let others = || (0..records.len()).filter(is_other).collect::<Vec<_>>();
        let too_few = |found: usize| EvaluationError::Setting {
            what: "`num_fewshot`".into(),
            expected: format!("at most {found}, the number of entries to sample from"),
            found: self.count.to_string(),
        };
        if *sampler == Sampler::FirstN {
            let others = others();
            return others.get(..self.count).map(<[usize]>::to_vec).ok_or_else(|| too_few(others.len()));
        }
        let wanted = self.count.saturating_add(usize::from(*excludes));
        if wanted > records.len() {
            return Err(too_few(records.len() - usize::from(*excludes).min(records.len())));
        }
        let mut drawn = self.random.sample(records.len(), wanted);
        drawn.retain(is_other);
        drawn.truncate(self.count);
        if drawn.len() < self.count {
            // The pool contains the question more than once, so sample again from the other entries.
            let others = others();
            if others.len() < self.count {
                return Err(too_few(others.len()));
            }
            drawn = self.random.sample(others.len(), self.count).into_iter().map(|at| others[at]).collect();
        }
        Ok(drawn)
    }
}

/// Python's `random.Random`.
struct PythonRandom(Mt);

impl PythonRandom {
    fn new(seed: u64) -> Self {
        // Words of the seed, lowest first, without leading zero words.
        let [a, b, c, d, e, f, g, h] = seed.to_le_bytes();
        let words = [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])];
        let used = if words[1] == 0 { 1 } else { 2 };
        Self(Mt::new_with_key(words[..used].iter().copied()))
    }

    /// Returns a random number below `bound`, which must be at least 1.
    fn below(&mut self, bound: usize) -> usize {
        let bits = usize::BITS - bound.leading_zeros();
        loop {
            // A pool in memory has fewer than 2^32 entries.
            let number = (self.0.next_u32() >> 32_u32.saturating_sub(bits)) as usize;
            if number < bound {
                return number;
            }
        }
    }

    /// Samples `count` distinct numbers below `len`, like `random.sample(range(len), count)`.
    fn sample(&mut self, len: usize, count: usize) -> Vec<usize> {
        let mut set_size = SMALLEST_POOL;
        if count > 5 {
            // 4 to the power of `ceil(log(3 count, 4))`.
            set_size += std::iter::successors(Some(1_usize), |power| Some(power * 4))
                .find(|power| *power >= 3 * count)
                .unwrap_or(usize::MAX / 2);
        }
        if len <= set_size {
            let mut pool: Vec<usize> = (0..len).collect();
            return (0..count)
                .map(|drawn| {
                    let left = len - drawn;
                    let at = self.below(left);
                    let last = pool[left - 1];
                    std::mem::replace(&mut pool[at], last)
                })
                .collect();
        }
        let mut chosen = Vec::with_capacity(count);
        let mut seen = std::collections::HashSet::new();
        while chosen.len() < count {
            let number = self.below(len);
            if seen.insert(number) {
                chosen.push(number);
            }
        }
        chosen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values come from CPython 3.13.
    ///
    /// The code was `r = random.Random(seed); [r.sample(range(n), k) for n, k in calls]`.
    #[test]
    fn samples_match_python() {
        let mut random = PythonRandom::new(1234);
        let sampled: Vec<Vec<usize>> = [(10, 3), (100, 5), (1000, 6), (30, 8), (21, 21)]
            .map(|(len, count)| random.sample(len, count))
            .into();
        let expected: [&[usize]; 5] = PYTHON_1234;
        assert_eq!(sampled, expected);
        assert_eq!(PythonRandom::new(0).sample(10_042, 10), PYTHON_0);
        assert_eq!(PythonRandom::new((1 << 40) + 7).sample(5000, 4), PYTHON_WIDE);
    }

    const PYTHON_1234: [&[usize]; 5] = [
        &[7, 1, 0],
        &[11, 74, 4, 85, 88],
        &[85, 100, 784, 363, 242, 17],
        &[0, 25, 29, 11, 20, 19, 15, 24],
        &[14, 4, 2, 5, 3, 0, 8, 7, 16, 1, 10, 20, 13, 11, 19, 17, 15, 6, 9, 12, 18],
    ];
    const PYTHON_0: [usize; 10] = [6311, 6890, 663, 4242, 8376, 7961, 6634, 4969, 7808, 5866];
    const PYTHON_WIDE: [usize; 4] = [4672, 3898, 2054, 1038];
}
