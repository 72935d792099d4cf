//! Attention as an operator on the graph of tokens: differentiable operators, modules and models on Burn.
