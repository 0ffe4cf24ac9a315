//! Chat templates: the Jinja program that a model ships to turn messages into its prompt.

use anyhow::{anyhow, Result};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{context, Environment, Error, ErrorKind};

/// A model's chat template with the two tokens that templates may name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatTemplate {
    pub source: String,
    pub bos_token: Option<String>,
    pub eos_token: Option<String>,
}

impl ChatTemplate {
    /// Takes `chat_template` of a `tokenizer_config.json`: a string, or a list of named templates,
    /// of which the one called "default" is for talking.
    pub fn source_of_config(config: &serde_json::Value) -> Option<String> {
        let template = &config["chat_template"];
        if let Some(source) = template.as_str() {
            return Some(source.to_string());
        }
        template
            .as_array()?
            .iter()
            .find(|t| t["name"] == "default")
            .and_then(|t| t["template"].as_str())
            .map(str::to_string)
    }

    /// Writes the prompt for one message of the user, up to where the model's answer begins.
    pub fn render(&self, system: Option<&str>, user: &str) -> Result<String> {
        let message = |role: &str, content: &str| context! { role => role, content => content };
        let messages: Vec<Value> = system
            .map(|s| message("system", s))
            .into_iter()
            .chain([message("user", user)])
            .collect();

        let mut env = Environment::new();
        // Hugging Face renders templates with these two on, and with the methods of Python's
        // strings and lists.
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()?;
        env.set_syntax(syntax);
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.add_function(
            "raise_exception",
            |message: String| -> Result<Value, Error> {
                Err(Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        env.add_function("strftime_now", |format: &str| {
            format_date(format, seconds_since_1970())
        });

        let unreadable = |e: Error| {
            anyhow!("the model's chat template doesn't render ({e}): give --raw to do without it")
        };
        env.template_from_str(&self.source)
            .map_err(unreadable)?
            .render(context! {
                messages => messages,
                add_generation_prompt => true,
                bos_token => self.bos_token.as_deref().unwrap_or(""),
                eos_token => self.eos_token.as_deref().unwrap_or(""),
            })
            .map_err(unreadable)
    }
}

pub fn seconds_since_1970() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| d.as_secs())
}

/// `strftime` in UTC, for the fields of a date and time of day; any other `%x` stays as it is.
pub fn format_date(format: &str, seconds: u64) -> String {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = [
        "Thursday",
        "Friday",
        "Saturday",
        "Sunday",
        "Monday",
        "Tuesday",
        "Wednesday",
    ];
    let days = seconds / 86_400;
    let (year, month, day) = civil_date(days);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let month_name = MONTHS[month as usize - 1];
    let day_name = DAYS[(days % 7) as usize];

    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => out += &year.to_string(),
            Some('m') => out += &format!("{month:02}"),
            Some('d') => out += &format!("{day:02}"),
            Some('H') => out += &format!("{hour:02}"),
            Some('M') => out += &format!("{minute:02}"),
            Some('S') => out += &format!("{second:02}"),
            Some('B') => out += month_name,
            Some('b') => out += &month_name[..3],
            Some('A') => out += day_name,
            Some('a') => out += &day_name[..3],
            Some('%') => out.push('%'),
            Some(other) => out.extend(['%', other]),
            None => out.push('%'),
        }
    }
    out
}

/// Year, month and day of a number of days since 1970-01-01.
fn civil_date(days: u64) -> (u64, u64, u64) {
    let is_leap = |y: u64| (y.is_multiple_of(4) && !y.is_multiple_of(100)) || y.is_multiple_of(400);
    let mut left = days;
    let mut year = 1970;
    while left >= 365 + u64::from(is_leap(year)) {
        left -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if left < length {
            break;
        }
        left -= length;
        month += 1;
    }
    (year, month, left + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate {
            source: source.to_string(),
            bos_token: Some("<s>".to_string()),
            eos_token: None,
        }
    }

    #[test]
    fn a_template_sees_the_messages_and_the_tokens() {
        let chat = template(
            "{{ bos_token }}{% for m in messages %}[{{ m.role }}|{{ m['content'].strip() }}]{{ \
             eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant|{% endif %}",
        );
        assert_eq!(
            chat.render(None, " hi ").unwrap(),
            "<s>[user|hi][assistant|"
        );
        assert_eq!(
            chat.render(Some("be brief"), "hi").unwrap(),
            "<s>[system|be brief][user|hi][assistant|"
        );
    }

    #[test]
    fn blocks_leave_no_lines_behind() {
        let chat = template(
            "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n\
             {% endfor %}\n",
        );
        assert_eq!(chat.render(None, "hi").unwrap(), "hi\n");
    }

    #[test]
    fn the_idioms_of_published_templates_work() {
        let chat = template(
            "{%- set ns = namespace(last=-1) -%}\
             {%- for m in messages[::-1] -%}\
             {%- if loop.index0 > 5 -%}{%- break -%}{%- endif -%}\
             {%- if m.content is string and not m.content.startswith('<x>') -%}\
             {%- set ns.last = messages|length - 1 - loop.index0 -%}{%- endif -%}\
             {%- endfor -%}\
             {{ ns.last }}|{{ 'a</t>b\n'.split('</t>')[-1].rstrip('\n') }}|{{ 'a\n'.lstrip('\n') | \
             trim }}|{{ tools is defined }}|{{ messages[0]['role'] == 'user' }}",
        );
        assert_eq!(chat.render(None, "hi").unwrap(), "0|b|a|False|True");
    }

    #[test]
    fn what_a_template_refuses_is_an_error_in_its_own_words() {
        let chat = template(
            "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}\
             {% endif %}",
        );
        assert!(chat.render(None, "hi").is_ok());
        let message = chat.render(Some("x"), "hi").unwrap_err().to_string();
        assert!(
            message.contains("no system role") && message.contains("--raw"),
            "{message}"
        );
        assert!(template("{% for %}").render(None, "hi").is_err());
    }

    #[test]
    fn a_config_holds_one_template_or_several() {
        let of = |text: &str| {
            ChatTemplate::source_of_config(&serde_json::from_str(text).expect("valid JSON"))
        };
        assert_eq!(of(r#"{"chat_template": "a"}"#).as_deref(), Some("a"));
        assert_eq!(
            of(r#"{"chat_template": [{"name": "rag", "template": "r"},
                {"name": "default", "template": "d"}]}"#)
            .as_deref(),
            Some("d")
        );
        assert_eq!(of("{}"), None);
    }

    #[test]
    fn dates_are_utc() {
        assert_eq!(format_date("%Y-%m-%d %H:%M:%S", 0), "1970-01-01 00:00:00");
        assert_eq!(
            format_date("%d %b %Y, %A", 1_709_210_096),
            "29 Feb 2024, Thursday"
        );
        assert_eq!(
            format_date("%B %a 100%% %q", 946_684_799),
            "December Fri 100% %q"
        );
    }
}
