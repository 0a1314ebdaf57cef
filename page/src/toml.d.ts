/** A file of sentences: by key, each in English and in Chinese, with | between them. build.js reads it. */
declare module "*.toml" {
  const words: Record<string, string>;
  export default words;
}
