//! Repeated measurements.

/// Values of one quantity.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples(Vec<f64>);

impl Samples {
    /// One more.
    pub(crate) fn add(&mut self, value: f64) {
        self.0.push(value);
        self.0.sort_by(f64::total_cmp);
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// The smallest; 0 if there is none.
    pub(crate) fn min(&self) -> f64 {
        self.0.first().copied().unwrap_or(0.0)
    }

    /// The largest; 0 if there is none.
    pub(crate) fn max(&self) -> f64 {
        self.0.last().copied().unwrap_or(0.0)
    }

    /// The middle one, or the mean of the two in the middle; 0 if there is none.
    pub(crate) fn median(&self) -> f64 {
        let middle = self.0.len() / 2;
        match self.0.get(middle) {
            None => 0.0,
            Some(upper) if self.0.len() % 2 == 1 => *upper,
            Some(upper) => (self.0[middle - 1] + upper) / 2.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_of_the_sorted_values() {
        let mut samples = Samples::default();
        assert_eq!(samples.median(), 0.0);
        for value in [3.0, 1.0, 2.0] {
            samples.add(value);
        }
        assert_eq!(
            (samples.min(), samples.median(), samples.max()),
            (1.0, 2.0, 3.0)
        );
        samples.add(4.0);
        assert_eq!((samples.median(), samples.count()), (2.5, 4));
    }
}
