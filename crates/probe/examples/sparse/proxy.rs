//! A proxy for the energy of arithmetic, by the axioms of "Spectral Sparse Attention", appendix C: it counts operations
//! and says what they would cost if energy depended on the width of the weights alone. Nothing here is measured, and no
//! number of it is a claim about a machine.

/// The proxy's constants. Energies are in pJ.
///
/// E1: the energy of a computation is the sum over its operations. E2: an operation on weights of `b` bits costs
/// `alpha b^gamma + beta`. E3: to the energy of arithmetic comes that of moving bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EnergyProxy {
    /// Factor of E2. Default 1/16: a multiplication and addition in 16 bits costs 1.
    pub alpha: f64,
    /// Exponent of E2. Default 1.
    pub gamma: f64,
    /// Constant of E2. Default 0.
    pub beta: f64,
    /// Energy of a byte that is moved. Default 0: memory is left out.
    pub byte: f64,
}

/// Bits of a weight in {-1, 0, 1}: log2 of 3.
pub const TERNARY_BITS: f64 = 1.584_962_500_721_156;

impl Default for EnergyProxy {
    fn default() -> Self {
        Self { alpha: 1.0 / 16.0, gamma: 1.0, beta: 0.0, byte: 0.0 }
    }
}

/// One attention layer's operations.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionWork {
    /// Tokens.
    pub tokens: usize,
    /// Channels of a token; queries, keys, values and outputs are projected by square layers.
    pub width: usize,
    /// Pairs of a query and a key (or a mean) that are evaluated, in all heads: their products and sums take as many
    /// multiplications as there are channels in a head, twice.
    pub entries: usize,
    /// Channels of a head.
    pub head_dim: usize,
}

/// What [`EnergyProxy::attention`] says, in pJ.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionEnergy {
    /// Of the four projections.
    pub projections: f64,
    /// Of products of queries with keys, and of weights with values: two activations each, always 16 bits.
    pub attention: f64,
}

impl EnergyProxy {
    /// Of one multiplication and addition with a weight of `bits` bits.
    pub fn operation(&self, bits: f64) -> f64 {
        self.alpha * bits.powf(self.gamma) + self.beta
    }

    /// Of multiplications and additions, each number of them with the bits of its weights, and of `bytes` moved.
    pub fn total(&self, operations: &[(f64, f64)], bytes: f64) -> f64 {
        operations.iter().map(|&(count, bits)| count * self.operation(bits)).sum::<f64>() + bytes * self.byte
    }

    /// Of an attention layer whose projections have weights of `bits` bits.
    pub fn attention(&self, work: AttentionWork, bits: f64) -> AttentionEnergy {
        let AttentionWork { tokens, width, entries, head_dim } = work;
        AttentionEnergy {
            projections: self.total(&[(4.0 * tokens as f64 * (width * width) as f64, bits)], 0.0),
            attention: self.total(&[(2.0 * entries as f64 * head_dim as f64, 16.0)], 0.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_calibration_is_the_published_one() {
        let proxy = EnergyProxy::default();
        assert_eq!(proxy.operation(16.0), 1.0);
        assert!((proxy.operation(TERNARY_BITS) - 0.1).abs() < 1e-3);
        let square = EnergyProxy { gamma: 2.0, beta: 0.5, byte: 3.0, ..proxy };
        assert_eq!(square.total(&[(2.0, 4.0), (1.0, 8.0)], 2.0), 2.0 * 1.5 + 4.5 + 6.0);
    }

    #[test]
    fn operations_are_those_of_the_layer() {
        let work = AttentionWork { tokens: 10, width: 8, entries: 30, head_dim: 4 };
        let energy = EnergyProxy::default().attention(work, 8.0);
        assert_eq!((energy.projections, energy.attention), (4.0 * 10.0 * 64.0 * 0.5, 2.0 * 30.0 * 4.0));
    }

    /// "Spectral Sparse Attention", table 7, in GB to its digits: 16 bits, and log2 of 3.
    #[test]
    fn sizes_are_the_published_ones() {
        for (billions, half, ternary) in [(7.0, 14.0, 1.4), (13.0, 26.0, 2.6), (70.0, 140.0, 13.8)] {
            assert_eq!(billions * 16.0 / 8.0, half);
            // The published digits are cut, not rounded, in the last row: 13.87.
            let gb = billions * TERNARY_BITS / 8.0;
            assert!((gb - ternary).abs() < 0.08, "{gb} instead of {ternary}");
        }
        assert!((16.0 / TERNARY_BITS - 10.1).abs() < 0.01);
    }
}
