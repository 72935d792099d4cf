//! The parts that a written tokenizer may have: what others have, such as regular expressions, is not read at all.

use serde::{Deserialize, de::IgnoredAny};

#[derive(Deserialize)]
struct Parts {
    model: Part,
    normalizer: Option<Part>,
    pre_tokenizer: Option<Part>,
    decoder: Option<Part>,
    post_processor: Option<IgnoredAny>,
    truncation: Option<IgnoredAny>,
    padding: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
}

/// Checks that the tokenizer in `bytes` is made of parts that [`Vocabulary`](super::Vocabulary) is made of. The error says what else
/// it has.
pub(super) fn check(bytes: &[u8]) -> Result<(), String> {
    let parts: Parts = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
    let pre_tokenizers = ["BertPreTokenizer", "ByteLevel", "Metaspace", "WhitespaceSplit"];
    let known: [(&str, Option<Part>, &[&str]); 4] = [
        ("model", Some(parts.model), &["BPE", "WordLevel"]),
        ("normalizer", parts.normalizer, &["Lowercase"]),
        ("pre_tokenizer", parts.pre_tokenizer, &pre_tokenizers),
        ("decoder", parts.decoder, &["ByteLevel", "Metaspace"]),
    ];
    for (name, part, kinds) in known {
        if let Some(part) = part.filter(|part| !kinds.contains(&part.kind.as_str())) {
            return Err(format!("its {name} is `{}`, expected {}", part.kind, kinds.join(" or ")));
        }
    }
    let unknown =
        [("post_processor", parts.post_processor), ("truncation", parts.truncation), ("padding", parts.padding)];
    match unknown.iter().find(|(_, part)| part.is_some()) {
        Some((name, _)) => Err(format!("it has `{name}`")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use crate::data::{TextRecipe, Tokens, Vocabulary};

    /// What reading a changed vocabulary of bytes says.
    fn changed(change: impl FnOnce(&mut Value)) -> String {
        let recipe = TextRecipe { tokens: Tokens::Bytes, ..TextRecipe::default() };
        let written = Vocabulary::learn(std::iter::empty(), &recipe).unwrap().to_bytes().unwrap();
        let mut json = serde_json::from_slice(&written).unwrap();
        change(&mut json);
        Vocabulary::from_bytes(json.to_string().as_bytes(), Path::new("t.json"))
            .map_or_else(|e| e.to_string(), |_| String::new())
    }

    #[test]
    fn parts_that_are_never_written_are_refused() {
        assert_eq!(changed(|_| ()), "");
        let split = json!({"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": false});
        let message = changed(|json| json["pre_tokenizer"] = split);
        assert!(message.contains("t.json") && message.contains("`Split`, expected BertPreTokenizer"), "{message}");
        let message = changed(|json| json["padding"] = json!({"strategy": {"Fixed": 1_000_000_000}}));
        assert!(message.contains("`padding`"), "{message}");
    }

    /// Ids index the rows of an embedding.
    #[test]
    fn ids_beyond_the_vocabulary_are_refused() {
        let message = changed(|json| json["model"]["vocab"]["a"] = 65_541.into());
        assert!(message.contains("t.json") && message.contains("ids"), "{message}");
    }
}
