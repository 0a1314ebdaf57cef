/** A file of sentences: by key, each in English and in Chinese. build.js reads it. */
declare module "*.toml" {
  const words: Record<string, [string, string]>;
  export default words;
}
