//! Conversations as texts.

use crate::{Error, Result, models::ModelFiles};
use minijinja::{Environment, ErrorKind};
use serde::Serialize;
use serde_json::{Map, Value};

/// Something that was said in a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    /// Who said it: `system`, `user` or `assistant`.
    pub role: String,
    /// What was said.
    pub content: String,
}

impl Message {
    /// From these.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: content.into(),
        }
    }
}

/// How a model wants conversations written: the template that comes with its tokenizer.
///
/// ```
/// # use anymesh_train::{ChatTemplate, Message};
/// let template = ChatTemplate::new(
///     "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
///      {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
/// );
/// let text = template.render(&[Message::new("user", "Hi")])?;
/// assert_eq!(text, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ChatTemplate {
    template: String,
    /// What else the template may use: tokens that begin and end texts.
    names: Map<String, Value>,
}

impl ChatTemplate {
    /// A template in the language of Jinja.
    pub fn new(template: impl Into<String>) -> Self {
        Self {
            template: template.into(),
            names: Map::new(),
        }
    }

    /// The template of a model; `None` where it has none, because it was not made for
    /// conversations.
    pub fn of(files: &ModelFiles) -> Result<Option<Self>> {
        let config = match files.json("tokenizer_config.json")? {
            Some(Value::Object(config)) => config,
            _ => Map::new(),
        };
        let file = files.text("chat_template.jinja")?;
        let template = match (file, config.get("chat_template")) {
            (Some(text), _) => text,
            (None, Some(Value::String(text))) => text.clone(),
            // Several by name, of which one is for conversations.
            (None, Some(Value::Array(list))) => {
                let named = |t: &&Value| t.get("name") == Some(&"default".into());
                let found = list.iter().find(named).and_then(|t| t.get("template"));
                match found.and_then(Value::as_str) {
                    Some(text) => text.into(),
                    None => return Ok(None),
                }
            }
            _ => return Ok(None),
        };
        let mut names = Map::new();
        for key in ["bos_token", "eos_token", "pad_token", "unk_token"] {
            // A token is a text, or an object with its text.
            let text = config.get(key).map(|t| t.get("content").unwrap_or(t));
            if let Some(text) = text.filter(|t| t.is_string()) {
                names.insert(key.into(), text.clone());
            }
        }
        Ok(Some(Self { template, names }))
    }

    /// A conversation as the text that the assistant is to go on with.
    pub fn render(&self, messages: &[Message]) -> Result<String> {
        let wrong = |error: minijinja::Error| Error::config("chat_template", format!("{error:#}"));
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function(
            "raise_exception",
            |text: String| -> Result<(), minijinja::Error> {
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, text))
            },
        );
        let mut context = self.names.clone();
        let messages =
            serde_json::to_value(messages).map_err(|e| Error::config("messages", e.to_string()))?;
        context.insert("messages".into(), messages);
        context.insert("add_generation_prompt".into(), true.into());
        environment
            .render_str(&self.template, &context)
            .map_err(wrong)
    }
}
